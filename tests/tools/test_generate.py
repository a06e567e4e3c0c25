"""`kvstrata generate`: what it restores from where, in processes that end, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from kvstrata.gpu_runtime.hf_models import tiny_model
from kvstrata.tools import cli

PROMPT = "one two three four five six seven eight nine ten eleven twelve"
"""62 bytes, so tokens of a tiny model: 3 full pages of 16, and 14 tokens."""

Call = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, here and in processes: kernels this small only lose by a second one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # what runs there runs here too
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config(root: Path, tmp_path: Path) -> Path:
    """The shipped file, with its L3 in a folder of the test."""
    text = (root / "configs/generate.toml").read_text()
    path = tmp_path / "generate.toml"
    path.write_text(text.replace("./var/generate", str(tmp_path / "l3")))
    return path


@pytest.fixture
def call(config: Path, tmp_path: Path) -> Call:
    """`call("tiny", "--epoch", "1")`: the command in this process, with PROMPT; its report."""

    def run(model: str | Path, *args: str, prompts: tuple[str, ...] = (PROMPT,)) -> dict[str, Any]:
        report = tmp_path / "report.json"
        line = ["generate", "--config", str(config), "--model", str(model), "--json", str(report)]
        for prompt in prompts:
            line += ["--prompt", prompt]
        assert cli.main([*line, "--max-new-tokens", "20", *args]) == 0
        values: dict[str, Any] = json.loads(report.read_text())
        return values

    return run


def hits(report: dict[str, Any], answer: int = 0) -> tuple[int, int, int]:
    found = report["answers"][answer]["hit_tokens"]
    return found["l1"], found["l2"], found["l3"]


def tokens(report: dict[str, Any], answer: int = 0) -> list[int]:
    found: list[int] = report["answers"][answer]["output_tokens"]
    return found


def test_a_second_process_restores_from_l3(
    run: Any, config: Path, tmp_path: Path, call: Call
) -> None:
    """The first one has ended, the second one is this."""
    report = tmp_path / "first.json"
    done = run("generate", "--config", config, "--model", "tiny", "--json", report,
               "--prompt", PROMPT, "--max-new-tokens", "20")  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    first = json.loads(report.read_text())
    assert done.stdout.splitlines()[0] == " ".join(map(str, tokens(first)))
    assert "from L3" in done.stdout
    assert len(tokens(first)) == 20
    assert first["stored"] == {"stored": 5}
    assert (hits(first), first["answers"][0]["computed_tokens"]) == ((0, 0, 0), 62)
    for mode in ("cache", "buffer_only"):
        again = call("tiny", "--set", f"staging.mode={mode}")
        assert (hits(again), again["answers"][0]["computed_tokens"]) == ((0, 0, 48), 14)
        assert tokens(again) == tokens(first)
        assert again["namespace"] == first["namespace"]


def test_prompts_of_one_call_share_their_prefix(call: Call) -> None:
    prompts = (PROMPT, PROMPT + " thirteen", PROMPT + " fourteen")
    report = call("tiny", prompts=prompts)
    found = sorted(hits(report, i) for i in range(3))  # whichever of them came first
    assert found == [(0, 0, 0), (48, 0, 0), (48, 0, 0)]
    for i, prompt in enumerate(prompts):
        alone = call("tiny", "--no-store", "--epoch", "7", prompts=(prompt,))
        assert hits(alone) == (0, 0, 0)
        assert tokens(alone) == tokens(report, i)


def test_epochs_salts_and_no_store(call: Call) -> None:
    """Where nothing may be shared, nothing is."""
    cold = call("tiny", "--no-store")
    assert cold["stored"] == {}
    first = call("tiny")
    assert hits(first) == (0, 0, 0)
    reports = [first]
    for args in (("--epoch", "1"), ("--salt", "a"), ("--salt", "b")):
        other, again = call("tiny", *args), call("tiny", *args)
        assert (hits(other), hits(again)) == ((0, 0, 0), (0, 0, 48)), args
        assert tokens(other) == tokens(again) == tokens(cold)
        reports.append(other)
    assert len({report["namespace"] for report in reports}) == 4
    assert hits(call("tiny", "--no-store")) == (0, 0, 48)


def test_weights_that_change_between_two_runs(call: Call) -> None:
    """One process, two sets of weights: the second finds nothing of the first, in no tier."""
    report = call("tiny", "--then", "tiny:5")
    assert [answer["epoch"] for answer in report["answers"]] == [0, 1]
    assert hits(report, 0) == hits(report, 1) == (0, 0, 0)
    assert tokens(report, 0) != tokens(report, 1)
    assert tokens(report, 1) == tokens(call("tiny:5", "--no-store"))
    again = call("tiny", "--then", "tiny:5")
    assert hits(again, 0) == hits(again, 1) == (0, 0, 48), "each finds its own in L3"
    assert [tokens(again, i) for i in (0, 1)] == [tokens(report, i) for i in (0, 1)]


def test_other_models_and_geometries_share_nothing(
    call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    call("tiny")
    assert capsys.readouterr().err == ""
    other = call("tiny-qwen2")
    assert hits(other) == (0, 0, 0)
    assert other["component"]["layers"] == 3
    assert "note: the pools take the model's geometry: 3 layers" in capsys.readouterr().err
    assert hits(call("tiny", "--set", "pools.page_tokens=8")) == (0, 0, 0)


def test_sampling_and_drafts(call: Call) -> None:
    greedy = call("tiny")
    drafted = call("tiny", "--draft", "4", "--no-store")
    assert tokens(drafted) == tokens(greedy)
    assert drafted["counters"]["drafted"] > 0
    hot = [call("tiny", "--temperature", "1.2", "--top-k", "50", "--top-p", "0.95", "--seed", s)
           for s in ("1", "1", "2")]  # fmt: skip
    assert tokens(hot[0]) == tokens(hot[1]) != tokens(hot[2])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu(call: Call) -> None:
    """The same tokens, and pages that were computed there serve the CPU, and the other way round:
    they are the same values, but for the last bits."""
    made = call("tiny", "--set", "device.kind=cuda")
    assert made["device"] == "cuda:0"
    assert hits(made) == (0, 0, 0)
    for kind in ("cuda", "cpu"):
        again = call("tiny", "--set", f"device.kind={kind}")
        assert (hits(again), tokens(again)) == ((0, 0, 48), tokens(made))


# ── directories ──────────────────────────────────────────────────────────────────────────────────


def save_model(path: Path, seed: int = 0, *, dtype: torch.dtype = torch.float32) -> None:
    tiny_model("qwen2", seed, dtype).save_pretrained(path)


def save_tokenizer(path: Path, extra: tuple[str, ...] = ()) -> None:
    """Bytes as tokens, as in byte-level BPE without merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    known = {letter: i for i, letter in enumerate([*alphabet, *extra])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=known, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_tokens(list(extra))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(path)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    save_model(path, dtype=torch.bfloat16)
    save_tokenizer(path)
    return path


def test_a_directory_prints_text(
    call: Call, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    report = call(directory)
    shown = capsys.readouterr()
    assert shown.out.startswith(PROMPT + report["answers"][0]["text"].splitlines()[0])
    assert "bfloat16" in shown.err
    assert report["component"]["dtype"] == "bfloat16"
    assert report["revision"].startswith("dir-")

    monkeypatch.chdir(directory)
    assert hits(call(".")) == (0, 0, 48), "the same directory by another path"
    save_model(directory, 1, dtype=torch.bfloat16)
    assert hits(call(directory)) == (0, 0, 0), "other weights in the same directory"
    save_model(directory, 1)
    assert hits(call(directory)) == (0, 0, 0), "another dtype"


def test_stop_tokens_come_from_the_directory(call: Call, directory: Path) -> None:
    whole = tokens(call(directory))
    stop = whole[7]
    at = whole.index(stop)
    file = directory / "generation_config.json"
    for value in (stop, [stop, 3]):
        settings = json.loads(file.read_text())
        settings["eos_token_id"] = value
        file.write_text(json.dumps(settings))
        found = tokens(call(directory))
        assert found[-1] in (stop, 3)
        assert found == whole[: len(found)]
        assert len(found) <= at + 1


def test_a_tokenizer_of_another_model_fails_the_run(
    config: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(directory, extra=("<foreign>",))
    line = ["generate", "--config", str(config), "--model", str(directory)]
    assert cli.main([*line, "--prompt", "a <foreign> token"]) == 1
    shown = capsys.readouterr()
    assert "vocabulary of 256" in shown.out
    assert "Traceback" not in shown.out + shown.err


# ── what is refused ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "nowhere"], ["nowhere", "config.json"]),
        (["--model", "tiny", "--temperature", "-1"], ["temperature", "-1"]),
        (["--model", "tiny", "--top-p", "0"], ["top_p"]),
        (["--model", "tiny", "--prompt", ""], ["tokens"]),
        (["--model", "tiny", "--max-new-tokens", "5000"], ["4096 positions"]),
        (["--model", "tiny", "--set", "pools.pages=3"], ["does not fit", "pools.pages"]),
        (["--model", "tiny-qwen2", "--set", "staging.bytes=40KiB"], ["staging", "3 pages of 12.0"]),
    ],
)
def test_refused(
    config: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: list[str]
) -> None:
    assert cli.main(["generate", "--config", str(config), *args]) == 2
    errors = capsys.readouterr().err
    assert errors.count("kvstrata: error: ") == 1
    for word in words:
        assert word in errors


def test_directories_without_a_tokenizer_and_models_that_cannot_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bare"
    save_model(path)
    line = ["generate", "--config", str(config), "--model", str(path)]
    assert cli.main(line) == 2
    assert "tokenizer" in capsys.readouterr().err
    settings = json.loads((path / "config.json").read_text())
    settings |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    settings["layer_types"] = ["sliding_attention"] * 3
    (path / "config.json").write_text(json.dumps(settings))
    save_tokenizer(path)
    assert cli.main(line) == 2
    assert "sliding_attention" in capsys.readouterr().err


def test_two_components(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = config.read_text()
    one = text[text.index("[[pools.components]]") : text.index("[staging]")]
    config.write_text(text.replace(one, one + one.replace('"kv"', '"more"')))
    assert cli.main(["generate", "--config", str(config), "--model", "tiny"]) == 2
    assert "2 components" in capsys.readouterr().err

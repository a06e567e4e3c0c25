"""`kvstrata generate`: a Transformers model that writes text, its KV in L1, L2 and L3.

The identity of the pages is complete: the model's path and the revision of its files (for a tiny
model the digest of its weights), its geometry and dtype, and epoch, adapter and salts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvstrata.configs import ComponentConfig, Config, load_config
from kvstrata.errors import CapacityError, InputError, Where
from kvstrata.gpu_runtime.hf_drafting import PromptLookup
from kvstrata.gpu_runtime.sampling import SamplingParams
from kvstrata.gpu_runtime.transformers_runner import TransformersRunner
from kvstrata.handles import Tier
from kvstrata.tiers import Namespace, RequestResult, RequestState
from kvstrata.tools.cli_options import JsonOption, SetOption
from kvstrata.tools.cli_output import STDOUT, write_json
from kvstrata.tools.engine import Engine, open_engine
from kvstrata.tools.generate_model import Subject, fit_config, load_subject
from kvstrata.tools.replay_report import HitTokens

STEP_TIMEOUT_S = 0.5
ENGINE = "transformers"
"""`Namespace.engine`: keys lie in the pools as Transformers rotates them."""

DEFAULT_PROMPT = (
    "The KV cache of a language model is the part of its work that can be kept: what it has read "
    "once it need not read again, if somebody remembers where the pages are. "
)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: what was restored from where, and what came of it."""

    prompt: str
    prompt_tokens: int
    hit_tokens: HitTokens
    computed_tokens: int
    output_tokens: list[int]
    text: str
    first_token_ms: float
    total_ms: float
    epoch: int = 0
    """Of the weights."""
    error: str = ""
    """Why it ended early; "" if it did not."""


@dataclass(frozen=True, slots=True)
class Asks:
    """What is asked of every prompt."""

    max_new_tokens: int
    sampling: SamplingParams
    store: bool = True


class GenerateReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvstrata generate --json` writes."""

    model: str
    revision: str
    namespace: str
    """Fingerprint of the requests' pages, in hex."""
    component: ComponentConfig
    device: str
    answers: list[Answer]
    counters: dict[str, int]
    stored: dict[str, int]
    """Pages by the outcome of their store in L3."""


# ── the run ──────────────────────────────────────────────────────────────────────────────────────


def run_generate(
    config: Config,
    subject: Subject,
    prompts: Sequence[str],
    *,
    asks: Asks,
    salt: str = "",
    draft_tokens: int = 0,
    then: Subject | None = None,
) -> GenerateReport:
    """Run all prompts at once; those that share a prefix compute it once. `config` is fitted.

    `then`: change to its weights afterwards, as another epoch, and run them again.
    """
    tokens = [_tokens(subject, prompt, asks.max_new_tokens) for prompt in prompts]
    runner = TransformersRunner(
        subject.model,
        drafter=PromptLookup() if draft_tokens else None,
        draft_tokens=draft_tokens,
        weights=lambda _: then.model.state_dict() if then else {},
    )
    own = msgspec.structs.replace(config.namespace(), engine=ENGINE)
    namespace = own.with_request(salt=salt, adapter="")
    with open_engine(config, runner) as engine:
        device = engine.runtime.core.device.torch_device
        answers = _ask(engine, subject, prompts, tokens, namespace, asks)
        if then is not None:
            new = msgspec.structs.replace(
                namespace, model=then.name, revision=then.revision, epoch=namespace.epoch + 1
            )
            engine.scheduler.new_epoch(new.epoch, lambda _: new.fingerprint())
            answers += _ask(engine, subject, prompts, tokens, new, asks)
        engine.runtime.check_integrity()
        stats = engine.runtime.storage_stats()
        stored = dict(stats.pages["store"]) if stats is not None else {}
    return GenerateReport(
        model=subject.name,
        revision=subject.revision,
        namespace=namespace.fingerprint().hex(),
        component=config.pools.components[0],
        device=str(device),
        answers=answers,
        counters={**engine.scheduler.cache.counters, **engine.scheduler.counters},
        stored={outcome.value: pages for outcome, pages in stored.items()},
    )


def _ask(
    engine: Engine,
    subject: Subject,
    prompts: Sequence[str],
    tokens: Sequence[bytes],
    namespace: Namespace,
    asks: Asks,
) -> list[Answer]:
    """All prompts under one namespace, to their end."""
    ids = [
        _submit(
            engine,
            t,
            namespace.fingerprint(),
            max_new_tokens=asks.max_new_tokens,
            stop_tokens=subject.stop_tokens,
            payload=asks.sampling.encode(),
            store=asks.store,
        )
        for t in tokens
    ]
    results = _drive(engine)
    return [
        _answer(subject, prompt, results[i], namespace)
        for prompt, i in zip(prompts, ids, strict=True)
    ]


def _tokens(subject: Subject, prompt: str, max_new_tokens: int) -> bytes:
    tokens = subject.encode(prompt)
    text_config = subject.model.config.get_text_config(decoder=True)
    most = getattr(text_config, "max_position_embeddings", None) or 2**31
    if len(tokens) + max_new_tokens > most:
        raise InputError(
            f"{len(tokens)} tokens and {max_new_tokens} new ones; the model knows {most} positions",
            remedy="give a shorter prompt, or a smaller --max-new-tokens",
            where=Where(key="prompt"),
        )
    return np.asarray(tokens, np.int32).tobytes()


def _submit(engine: Engine, tokens: bytes, namespace: bytes, **settings: Any) -> int:
    try:
        return engine.scheduler.submit(tokens, namespace, **settings)
    except CapacityError as exc:
        raise InputError(
            f"the prompt does not fit: {exc}",
            remedy="raise pools.pages or pools.max_context_tokens in the config",
            where=Where(key="prompt"),
        ) from exc


def _drive(engine: Engine) -> dict[int, RequestResult]:
    """Until all have ended and everything is stored."""
    results = {}
    while not engine.scheduler.idle:
        for result in engine.scheduler.step(STEP_TIMEOUT_S):
            results[result.request_id] = result
    return results


def _answer(subject: Subject, prompt: str, result: RequestResult, namespace: Namespace) -> Answer:
    finished = result.state is RequestState.FINISHED
    output = np.frombuffer(result.output_tokens, np.int32).tolist()
    return Answer(
        prompt=prompt,
        prompt_tokens=result.prompt_tokens,
        hit_tokens=HitTokens(*(result.hit_pages[tier] * namespace.page_tokens for tier in Tier)),
        computed_tokens=result.computed_tokens,
        output_tokens=output,
        text=subject.decode(output),
        first_token_ms=round(result.first_token_s * 1e3, 3),
        total_ms=round(result.total_s * 1e3, 3),
        epoch=namespace.epoch,
        error="" if finished else result.error or result.state.value,
    )


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def generate(
    config: Annotated[Path, typer.Option(help="Configuration file (TOML).")],
    model: Annotated[
        str,
        typer.Option(help="Directory of a model, or tiny, tiny-qwen2, tiny-qwen3: random weights."),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to go on with; repeatable, all run at once.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt.")] = 32,
    temperature: Annotated[float, typer.Option(help="0: the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the K most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely ones up to this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    draft: Annotated[
        int, typer.Option(min=0, help="Guess up to N tokens a step from the text so far.")
    ] = 0,
    no_store: Annotated[
        bool, typer.Option("--no-store", help="Keep nothing of these prompts, in no tier.")
    ] = False,
    salt: Annotated[
        str, typer.Option(help="Share with nobody but this salt. Others see it in the process list")
    ] = "",
    epoch: Annotated[
        int | None, typer.Option(min=0, help="Epoch of the weights, instead of namespace.epoch.")
    ] = None,
    then: Annotated[
        str,
        typer.Option(help="Then change to the weights of this model, and run the prompts again."),
    ] = "",
    json: JsonOption = None,
    set_: SetOption = None,
) -> None:
    """Continue prompts with a model, and say what was restored from where.

    Geometry of the pools, model and revision come from the model, whatever the config says there.
    """
    # Nothing is fetched: what is not in the directory is missing.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sampling = SamplingParams(temperature, top_k, top_p, seed)
    sampling.encode()
    overrides = list(set_ or [])
    if epoch is not None:
        overrides.append(f"namespace.epoch={epoch}")
    settings = load_config(config, overrides)
    subject = load_subject(model)
    fitted, notes = fit_config(settings, subject)
    console = Console(stderr=True, highlight=False)
    for note in notes:
        console.print(f"note: {note}")
    report = run_generate(
        fitted,
        subject,
        prompt or [DEFAULT_PROMPT],
        asks=Asks(max_new_tokens, sampling, not no_store),
        salt=salt,
        draft_tokens=draft,
        then=load_subject(then) if then else None,
    )
    print_report(report, subject.has_text, Console(highlight=False, stderr=json == STDOUT))
    if json is not None:
        write_json(report, json)
    if any(answer.error for answer in report.answers):
        raise typer.Exit(1)


def print_report(report: GenerateReport, has_text: bool, console: Console) -> None:
    """The texts, then where their prompts came from."""
    for answer in report.answers:
        if answer.error:
            console.print(f"error: {answer.error}", style="red", markup=False, soft_wrap=True)
        elif has_text:
            console.print(answer.prompt, style="dim", end="", markup=False, soft_wrap=True)
            console.print(answer.text, markup=False, soft_wrap=True)
        else:
            console.print(" ".join(map(str, answer.output_tokens)), soft_wrap=True)
    table = Table(
        "prompt", "epoch", title=f"{report.model} on {report.device}", title_justify="left"
    )
    for name in ("tokens", "from L1", "from L2", "from L3", "computed", "new", "first token"):
        table.add_column(name, justify="right")
    for i, answer in enumerate(report.answers, 1):
        hits = answer.hit_tokens
        numbers = (answer.prompt_tokens, hits.l1, hits.l2, hits.l3, answer.computed_tokens)
        table.add_row(
            str(i),
            str(answer.epoch),
            *map(str, numbers),
            str(len(answer.output_tokens)),
            f"{answer.first_token_ms:,.1f} ms",
        )
    console.print(table)
    parts = [f"{n} pages {outcome}" for outcome, n in sorted(report.stored.items())]
    if parts:
        console.print(f"L3: {', '.join(parts)}")
    if drafted := report.counters.get("drafted", 0):
        console.print(f"drafts: {report.counters.get('accepted', 0)} of {drafted} accepted")

/* The loop of `CudaCopies._through_chunks` over the chunks of one copy, call for call, for a thread
 * that has given the interpreter lock away. `cuda_native` compiles and calls it. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int (*record)(int64_t event, int64_t stream);
    int (*wait)(int64_t stream, int64_t event, unsigned flags);
    int (*launch)(int64_t graph, int64_t stream);
    int (*synchronize)(int64_t event);
    int (*copy_batch)();
    int64_t tells_failed; /* it takes one more argument: where to tell which copy was refused */
    int64_t attributes, first;
} Driver;

typedef struct {
    int64_t chunk, order; /* addresses */
    int64_t moved, bussed; /* events */
} Step;

typedef struct {
    int64_t turn; /* the step that is next; told back */
    int64_t ring, out, kernels, bus;
    int64_t host, host_step; /* what moves of the first host page, and the bytes to the next one */
    int64_t nbytes; /* of each page */
    int64_t joins; /* neighbours on the host move as one */
    int64_t border; /* but no run crosses a multiple of it */
    int64_t header, first_piece, pieces, page_words;
    int64_t chunks;
} Copy;

#define TRY(call) do { int code = (call); if (code) return code; } while (0)

static int copy_batch(const Driver *driver, const int64_t *to, const int64_t *from,
                      const int64_t *lengths, size_t count, int64_t stream)
{
    size_t failed;
    if (driver->tells_failed) {
        int (*call)(const void *, const void *, const void *, size_t, int64_t, int64_t, size_t,
                    size_t *, int64_t) = (void *)driver->copy_batch;
        return call(to, from, lengths, count, driver->attributes, driver->first, 1, &failed, stream);
    }
    int (*call)(const void *, const void *, const void *, size_t, int64_t, int64_t, size_t,
                int64_t) = (void *)driver->copy_batch;
    return call(to, from, lengths, count, driver->attributes, driver->first, 1, stream);
}

static int move(const Driver *driver, const Step *step, int64_t graph, const Copy *copy,
                const int64_t *pages, int64_t count)
{
    int64_t *order = (int64_t *)step->order;
    const int64_t header[] = {count, copy->first_piece, copy->pieces, copy->page_words, 0, 0};
    memcpy(order, header, sizeof header);
    memcpy(order + copy->header, pages, count * sizeof *pages);
    TRY(driver->launch(graph, copy->kernels));
    return driver->record(step->moved, copy->kernels);
}

/* `borders`: where the chunks begin in `pages` and `slots`, and the end. `scratch`: three numbers
 * for each page of a chunk. Returns the driver's code when it refuses a call, and stops there. */
int kvstrata_enqueue(const Driver *driver, const Step *steps, const int64_t *graphs,
                     const int64_t *borders, const int64_t *pages, const int64_t *slots,
                     int64_t *scratch, Copy *copy)
{
    for (int64_t k = 0; k < copy->chunks; k++) {
        const int64_t at = borders[k], count = borders[k + 1] - at, turn = copy->turn;
        const Step *before = &steps[(turn + copy->ring - 2) % copy->ring], *step = &steps[turn];
        int64_t *there = scratch, *here = there + count, *lengths = here + count, runs = 0;

        copy->turn = (turn + 1) % copy->ring;
        TRY(driver->synchronize(step->moved));
        for (int64_t i = 0; i < count; i++) {
            const int64_t slot = slots[at + i];
            if (i && copy->joins && slot == slots[at + i - 1] + 1 && slot % copy->border) {
                lengths[runs - 1] += copy->nbytes;
            } else {
                there[runs] = step->chunk + i * copy->nbytes;
                here[runs] = copy->host + slot * copy->host_step;
                lengths[runs++] = copy->nbytes;
            }
        }
        if (copy->out) {
            TRY(driver->wait(copy->kernels, before->bussed, 0));
            TRY(move(driver, step, graphs[turn], copy, pages + at, count));
            TRY(driver->wait(copy->bus, step->moved, 0));
            TRY(copy_batch(driver, here, there, lengths, runs, copy->bus));
            TRY(driver->record(step->bussed, copy->bus));
        } else {
            TRY(driver->wait(copy->bus, before->moved, 0));
            TRY(copy_batch(driver, there, here, lengths, runs, copy->bus));
            TRY(driver->record(step->bussed, copy->bus));
            TRY(driver->wait(copy->kernels, step->bussed, 0));
            TRY(move(driver, step, graphs[turn], copy, pages + at, count));
        }
    }
    return 0;
}

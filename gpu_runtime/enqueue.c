/* The loop of `CudaCopies._through_chunks` over the chunks of one copy, call for call, for a thread
 * that has given the interpreter lock away. `cuda_chunks` compiles and calls it, and lays out in
 * memory what is declared here. */

#define _POSIX_C_SOURCE 199309L /* nanosleep */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef void *Handle;

_Static_assert(sizeof(Handle) == sizeof(int64_t), "handles and addresses are written as int64");

typedef int CopyBatch(const int64_t *to, const int64_t *from, const int64_t *lengths, size_t count,
                      void *attributes, void *first, size_t one, Handle stream);
typedef int OldCopyBatch(const int64_t *to, const int64_t *from, const int64_t *lengths,
                         size_t count, void *attributes, void *first, size_t one, size_t *failed,
                         Handle stream);

typedef struct {
    int (*record)(Handle event, Handle stream);
    int (*wait)(Handle stream, Handle event, unsigned flags);
    int (*launch)(Handle graph, Handle stream);
    int (*synchronize)(Handle event);
    int (*query)(Handle event);
    void (*copy_batch)(void); /* a CopyBatch, or if `is_old` an OldCopyBatch */
    int64_t is_old;
    void *attributes, *first;
} Driver;

typedef struct {
    int64_t chunk; /* its address */
    int64_t *order;
    int64_t device_order; /* its address on the device */
    Handle moved, bussed;
} Step;

typedef struct {
    int64_t turn; /* the step that is next; told back */
    int64_t ring, out;
    volatile const int64_t *hurry; /* not 0: kernels wait on the GPU, the host does not */
    int64_t pause; /* bytes of a chunk for each nanosecond of a sleep */
    Handle kernels, bus;
    int64_t host, host_step; /* what moves of the first host page, and the bytes to the next one */
    int64_t nbytes;          /* of each page */
    int64_t joins;           /* neighbours on the host move as one */
    int64_t border;          /* but no run crosses a multiple of it */
    int64_t header, first_piece, pieces, page_words;
    int64_t chunks;
    int64_t chunk;     /* the one that is next; told back */
    int64_t late;      /* the step whose kernel is next, its pages being on their way; -1: none; told
                          back */
    Handle late_graph; /* the kernel */
    int64_t stops;     /* behind the first kernel that is late */
    int64_t leaves;    /* the last kernel stays late */
    int64_t refused;   /* told back: which call was, see below */
} Copy;

enum { SYNCHRONIZE, WAIT, QUERY, LAUNCH, RECORD, COPY_BATCH };

enum { NOT_READY = 600, STOPPED = -1 };

_Static_assert(sizeof(Copy) == COPY_BYTES, "as `cuda_chunks` lays it out");

#define TRY(number, call)               \
    do {                                \
        const int code = (call);        \
        if (code) {                     \
            copy->refused = (number);   \
            return code;                \
        }                               \
    } while (0)

#define PASS(call)                \
    do {                          \
        const int code = (call);  \
        if (code)                 \
            return code;          \
    } while (0)

static int copy_batch(const Driver *driver, const int64_t *to, const int64_t *from,
                      const int64_t *lengths, size_t count, Handle stream)
{
    size_t failed;
    if (driver->is_old)
        return ((OldCopyBatch *)driver->copy_batch)(to, from, lengths, count, driver->attributes,
                                                    driver->first, 1, &failed, stream);
    return ((CopyBatch *)driver->copy_batch)(to, from, lengths, count, driver->attributes,
                                             driver->first, 1, stream);
}

/* What goes to the kernels' stream next comes behind `event`. `nbytes` move after that, so it may be
 * late. */
static int come_behind(const Driver *driver, Copy *copy, Handle event, int64_t nbytes)
{
    const struct timespec pause = {0, (long)(nbytes / copy->pause)};
    int answer;
    while ((answer = driver->query(event)) == NOT_READY) {
        if (*copy->hurry) {
            TRY(WAIT, driver->wait(copy->kernels, event, 0));
            return 0;
        }
        nanosleep(&pause, NULL);
    }
    TRY(QUERY, answer);
    return 0;
}

static void write_order(const Step *step, const Copy *copy, const int64_t *pages, int64_t count)
{
    const int64_t header[] = {count, copy->first_piece, copy->pieces, copy->page_words, 0, 0};
    memcpy(step->order, header, sizeof header);
    memcpy(step->order + copy->header, pages, (size_t)count * sizeof *pages);
}

static int move(const Driver *driver, const Step *step, Handle graph, Copy *copy)
{
    TRY(LAUNCH, driver->launch(graph, copy->kernels));
    TRY(RECORD, driver->record(step->moved, copy->kernels));
    return 0;
}

static int move_late(const Driver *driver, const Step *steps, Copy *copy)
{
    PASS(move(driver, &steps[copy->late], copy->late_graph, copy));
    copy->late = -1;
    return 0;
}

/* `borders`: where the chunks begin in `pages` and `slots`, and the end. `scratch`: three numbers
 * for each page of a chunk, and three more. Returns the driver's code when it refuses a call, and
 * ends there, or STOPPED; called again after that, it goes on. */
int kvstrata_enqueue(const Driver *driver, const Step *steps, const Handle *graphs,
                     const int64_t *borders, const int64_t *pages, const int64_t *slots,
                     int64_t *scratch, Copy *copy)
{
    while (copy->chunk < copy->chunks) {
        const int64_t at = borders[copy->chunk], count = borders[copy->chunk + 1] - at;
        const int64_t turn = copy->turn;
        const int is_late = copy->late >= 0;
        const Step *before = &steps[(turn + copy->ring - 2) % copy->ring], *step = &steps[turn];
        int64_t *there = scratch, *here = there + count + 1, *lengths = here + count + 1;
        size_t runs = 0;

        copy->chunk++;
        copy->turn = (turn + 1) % copy->ring;
        TRY(SYNCHRONIZE, driver->synchronize(step->moved));
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
        write_order(step, copy, pages + at, count);
        if (copy->out) {
            PASS(come_behind(driver, copy, before->bussed, count * copy->nbytes));
            PASS(move(driver, step, graphs[turn], copy));
        } else { /* the order goes with the pages */
            there[runs] = step->device_order;
            here[runs] = (int64_t)(intptr_t)step->order;
            lengths[runs++] = (copy->header + count) * (int64_t)sizeof *pages;
        }
        TRY(WAIT, driver->wait(copy->bus, (copy->out ? step : before)->moved, 0));
        TRY(COPY_BATCH, copy->out ? copy_batch(driver, here, there, lengths, runs, copy->bus)
                                  : copy_batch(driver, there, here, lengths, runs, copy->bus));
        TRY(RECORD, driver->record(step->bussed, copy->bus));
        if (is_late) {
            const Handle event = steps[copy->late].bussed;
            PASS(come_behind(driver, copy, event, count * copy->nbytes));
            PASS(move_late(driver, steps, copy));
        }
        if (!copy->out) { /* the next one goes on the bus first */
            copy->late = turn;
            copy->late_graph = graphs[turn];
        }
        if (is_late && copy->stops)
            return STOPPED;
    }
    if (copy->late >= 0 && !copy->leaves) {
        TRY(WAIT, driver->wait(copy->kernels, steps[copy->late].bussed, 0));
        PASS(move_late(driver, steps, copy));
        if (copy->stops)
            return STOPPED;
    }
    return 0;
}

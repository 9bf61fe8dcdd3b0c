/* Part of bn.c: torch's threads, what a call gives them to do, and how far their cores are apart. */

/* ---- threads ------------------------------------------------------------------------------------------------ */

/* While waiting: yield the core to its other hardware thread; to another thread; or sleep for a while. */
static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void yield(int long_since) {
#if !defined(_WIN32)
    if (long_since) nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    else sched_yield();
#else
    (void)long_since;
#endif
}

typedef void (*task_fn)(void *context, int64_t task);
typedef void (*gomp_parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*thread_number_fn)(void);

static gomp_parallel_fn gomp_parallel;
static thread_number_fn thread_number;

enum { MAX_THREADS = 256 };

/* Work that all threads finish before any of them continues: so many tasks, in this order or the other. */
typedef struct {
    task_fn run;
    int64_t tasks;
    int backwards;
} phase;

enum { MAX_PHASES = 4 };

/* A number for each phase; those of two threads do not share a cache line. */
typedef struct {
    _Atomic int64_t of[MAX_PHASES];
    char apart[64 - MAX_PHASES * sizeof(int64_t)];
} counters;

typedef struct {
    const phase *phases;
    int64_t count, threads;
    void *context;
    counters done, next[MAX_THREADS];
} job;

/* Usually for less than a microsecond. If it takes longer, a thread that has taken a task is waiting for a core: yield ours. */
static void wait_for(const _Atomic int64_t *done, int64_t tasks) {
    for (int64_t tries = 0; atomic_load_explicit(done, memory_order_acquire) < tasks; tries++)
        if (tries < 4096) relax();
        else yield(tries > 8192);
}

/* Every thread has a share of neighbouring tasks, the same one in every call, so that it meets its own data in its own
 * cache; when it is through, it helps the others, so that it waits only for tasks that another thread has begun, never
 * for a thread that has not started. Which thread runs a task never changes a result. A phase ends with its last task, not
 * with its last thread: starting and ending the threads for every phase takes longer. */
static void work(void *data) {
    job *j = data;
    const int64_t me = j->threads > 1 ? thread_number() : 0;
    for (int64_t p = 0; p < j->count; p++) {
        const phase *now = &j->phases[p];
        int64_t ran = 0;
        for (int64_t i = 0; i < j->threads; i++) {
            const int64_t s = (me + i) % j->threads;
            const int64_t from = s * now->tasks / j->threads, end = (s + 1) * now->tasks / j->threads;
            for (int64_t t; (t = atomic_fetch_add_explicit(&j->next[s].of[p], 1, memory_order_relaxed)) < end; ran++)
                now->run(j->context, now->backwards ? from + end - 1 - t : t);
        }
        if (ran) atomic_fetch_add_explicit(&j->done.of[p], ran, memory_order_acq_rel);
        if (p + 1 < j->count) wait_for(&j->done.of[p], now->tasks);
    }
}

static void parallel_phases(int64_t threads, const phase *phases, int64_t count, void *context) {
    int64_t most = 1;
    for (int64_t p = 0; p < count; p++) most = phases[p].tasks > most ? phases[p].tasks : most;
    if (threads > most) threads = most;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads <= 1 || !gomp_parallel) {
        for (int64_t p = 0; p < count; p++)
            for (int64_t t = 0; t < phases[p].tasks; t++)
                phases[p].run(context, phases[p].backwards ? phases[p].tasks - 1 - t : t);
        return;
    }
    job j;
    j.phases = phases, j.count = count, j.threads = threads, j.context = context;
    for (int64_t p = 0; p < count; p++) {
        atomic_init(&j.done.of[p], 0);
        for (int64_t s = 0; s < threads; s++) atomic_init(&j.next[s].of[p], s * phases[p].tasks / threads);
    }
    gomp_parallel(work, &j, (unsigned)threads, 0);
}

static void parallel(int64_t threads, int64_t tasks, task_fn run, void *context) {
    parallel_phases(threads, &(phase){run, tasks, 0}, 1, context);
}

/* ---- how far the cores are apart ---------------------------------------------------------------------------- */

enum { EXCHANGES = 1000 };

typedef struct {
    _Atomic int64_t line;
    char apart[64];
    _Atomic int given_up;
    double nanoseconds;
} exchange;

static double nanoseconds_now(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

/* Wait for a number in the line; but not for a thread that never came. */
static int comes_up(exchange *e, int64_t number) {
    for (int64_t spins = 0; atomic_load_explicit(&e->line, memory_order_acquire) != number; spins++) {
        if (spins > 4000000) atomic_store(&e->given_up, 1);
        if (atomic_load_explicit(&e->given_up, memory_order_relaxed)) return 0;
        relax();
    }
    return 1;
}

/* The first thread writes odd numbers, the second one answers with even ones; the first one begins. */
static void take_turns(void *data) {
    exchange *e = data;
    const int64_t me = thread_number();
    if (me > 1) return;
    if (me == 1) atomic_store(&e->line, 0);
    else if (!comes_up(e, 0)) return;
    const double start = nanoseconds_now();
    for (int64_t i = 0; i < EXCHANGES; i++) {
        if (me == 1 && !comes_up(e, 2 * i + 1)) return;
        atomic_store_explicit(&e->line, 2 * i + 1 + me, memory_order_release);
        if (me == 1) continue;
        if (!comes_up(e, 2 * i + 2)) return;
        /* Two threads on one core would be at it for seconds. */
        if (i % 8 == 7 && nanoseconds_now() - start > 2e7) atomic_store(&e->given_up, 1);
    }
    if (me == 0) e->nanoseconds = (nanoseconds_now() - start) / (2 * EXCHANGES);
}

double bn_core_distance(void) {
    exchange e = {.nanoseconds = -1};
    atomic_init(&e.line, -1);
    if (gomp_parallel) gomp_parallel(take_turns, &e, 2, 0);
    return e.nanoseconds;
}

void bn_use_openmp(void *parallel_entry, void *number_entry) {
    memcpy(&gomp_parallel, &parallel_entry, sizeof gomp_parallel);
    memcpy(&thread_number, &number_entry, sizeof thread_number);
}

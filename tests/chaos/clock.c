/* A wall clock that is wrong: loaded into every process of a cluster by LD_PRELOAD.

   The file WRONG_CLOCK_FILE holds by how many seconds, as one 64-bit integer. All processes have it
   mapped, so that a write there sets all their clocks at once. Clocks that count from the start of
   the machine stay right. The kernel's clock is not wrong, so what was added is taken off again from
   the deadlines of the three calls at the end; other waits for a time of day are not corrected. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t right = 0;
static volatile int64_t *wrong_by = &right;

__attribute__((constructor)) static void map_file(void) {
    const char *path = getenv("WRONG_CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        wrong_by = mapped;
    close(file);
}

/* The C library's function of this name, which ours hides. */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real)
        real = REAL(clock_gettime);
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *wrong_by;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME_COARSE, &exact);
    if (seconds)
        *seconds = exact.tv_sec;
    return exact.tv_sec;
}

/* The deadline as the kernel's clock has it. One that counts from the start of the machine is much
   smaller than any date of this century, and "for ever" much larger: both are left alone. */
static struct timespec of_kernel(const struct timespec *deadline) {
    struct timespec moved = *deadline;
    if (moved.tv_sec > 1000000000LL && moved.tv_sec < 1LL << 40)
        moved.tv_sec -= *wrong_by;
    return moved;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static __typeof__(&pthread_cond_timedwait) real;
    if (!real) /* dlsym alone would find the one of 1999, whose conditions are smaller */
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) /* only old architectures have two */
        real = REAL(pthread_cond_timedwait);
    struct timespec moved = of_kernel(deadline);
    return real(condition, mutex, &moved);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex,
                            const struct timespec *restrict deadline) {
    static __typeof__(&pthread_mutex_timedlock) real;
    if (!real)
        real = REAL(pthread_mutex_timedlock);
    struct timespec moved = of_kernel(deadline);
    return real(mutex, &moved);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    static __typeof__(&sem_timedwait) real;
    if (!real)
        real = REAL(sem_timedwait);
    struct timespec moved = of_kernel(deadline);
    return real(semaphore, &moved);
}

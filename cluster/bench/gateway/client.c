/* Load generator for `diptych bench gateway`: server-sent events over HTTP/1.1, one epoll loop.
 *
 * client HOST PORT BODY STREAMS SLOW LEAVERS SPAN_MS RAMP_MS
 *
 * BODY is a file with the whole HTTP request. STREAMS healthy clients connect over RAMP_MS and read
 * as fast as bytes come; SLOW ones come over five times that, have a small receive buffer and read
 * 64 bytes a second; LEAVERS come over SPAN_MS, and each is gone (half by a reset) 0.1 to 1 s after
 * its first byte. A token is a space in the body that does not follow a colon: the source's tokens
 * are words with a space before them, and an event begins with "data: ".
 *
 * Prints a line "begun NS TOKENS" when every healthy stream has its second token, "ending NS
 * TOKENS" when the first one is complete, and a JSON object when all are (or 20 s after the last
 * byte).
 * Behind first tokens, which come from the prefill source, flat streams wait for each other about a
 * second, which is no part of the measurement. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum kind { HEALTHY, SLOW, LEAVER };
enum { WAIT_MS = 20000, SLOW_BYTES = 64, SLOW_MS = 1000, MORE = 4096 };

typedef struct {
    int fd;
    enum kind kind;
    int64_t start_ms, next_ms;   /* connects; reads (slow) or leaves (leaver) */
    int64_t last_ns;             /* of the last token */
    long tokens, status;
    int head, over;              /* bytes of "\r\n\r\n" seen; ended */
    char tail[8];                /* last bytes */
} stream;

static struct sockaddr_in address;
static char request[1 << 22];
static long request_size;
static stream *streams;
static int count, healthy, begun, ended, failed, refused, slow_refused, left_early, dropped;
static int connected;
static long tokens, events;
static int64_t bytes, busy_ns;
static uint32_t *gaps;           /* of healthy streams between begun and ending, in microseconds */
static long gap_count, gap_room;
static int measuring;
static int poller;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void gap(int64_t ns) {
    if (gap_count == gap_room) {
        gap_room = gap_room ? gap_room * 2 : 1 << 16;
        gaps = realloc(gaps, gap_room * sizeof *gaps);
        if (!gaps) exit(3);
    }
    gaps[gap_count++] = ns / 1000;
}

static void finish(stream *s) {
    if (s->fd >= 0) close(s->fd);
    s->fd = -1;
    s->over = 1;
}

static void start(stream *s) {
    s->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s->fd < 0) { perror("socket"); exit(3); }
    int one = 1, small = 2048;
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (s->kind == SLOW) setsockopt(s->fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    if (connect(s->fd, (struct sockaddr *)&address, sizeof address)) {
        if (s->kind == HEALTHY) failed++, ended++;
        finish(s);
        return;
    }
    connected++;
    for (long sent = 0; sent < request_size;) {
        ssize_t n = send(s->fd, request + sent, request_size - sent, MSG_NOSIGNAL);
        if (n <= 0) { if (s->kind == HEALTHY) failed++, ended++; finish(s); return; }
        sent += n;
    }
    fcntl(s->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = s};
    if (s->kind != SLOW) epoll_ctl(poller, EPOLL_CTL_ADD, s->fd, &e);
}

/* Tokens in these bytes; the head of the answer is skipped. */
static long scan(stream *s, const char *data, ssize_t size) {
    static const char end[] = "\r\n\r\n";
    long found = 0;
    ssize_t at = 0;
    while (at < size && s->head < 4) {
        if (s->head == 0 && !s->status && size - at > 12) s->status = atol(data + at + 9);
        s->head = data[at] == end[s->head] ? s->head + 1 : data[at] == '\r';
        at++;
    }
    char before = s->tail[7];
    for (ssize_t i = at; i < size; i++) {
        if (data[i] == ' ') {
            if (before == ':') events++; else found++;
        }
        before = data[i];
    }
    for (ssize_t i = size > 8 ? size - 8 : 0; i < size; i++) {
        memmove(s->tail, s->tail + 1, 7);
        s->tail[7] = data[i];
    }
    return found;
}

static void say(const char *what, int64_t now) {
    printf("%s %lld %ld\n", what, (long long)now, tokens);
    fflush(stdout);
}

/* Reads once; healthy streams are measured. */
static void take(stream *s, size_t most) {
    static char data[1 << 18];
    ssize_t n = read(s->fd, data, most < sizeof data ? most : sizeof data);
    if (n < 0 && errno == EAGAIN) return;
    int64_t now = now_ns();
    if (n > 0) {
        bytes += n;
        long found = scan(s, data, n);
        if (s->kind == HEALTHY && found) {
            tokens += found;
            if (s->tokens && measuring) {
                gap(now - s->last_ns);
                for (long i = 1; i < found; i++) gap(0);
            }
            s->last_ns = now;
            int has_second = s->tokens < 2 && s->tokens + found >= 2;
            if (has_second && ++begun == healthy) { measuring = 1; say("begun", now); }
        }
        if (s->kind == LEAVER && !s->next_ms) s->next_ms = now / 1000000 + 100 + (s - streams) * 7 % 900;
        s->tokens += found;
    }
    int complete = n > 0 && memcmp(s->tail + 1, "\r\n0\r\n\r\n", 7) == 0;
    if (n > 0 && !complete) return;
    if (s->kind == HEALTHY) {
        if (!complete || s->status != 200) failed++;
        if (s->status != 200) refused++;
        if (!ended++ && begun == healthy) { measuring = 0; say("ending", now); }
    } else if (s->kind == SLOW) {
        if (s->status && s->status != 200) slow_refused++;
        else if (!complete) dropped++;
    }
    finish(s);
}

/* What is due by time: connects, slow reads, leavers. Returns the time of the next such thing. */
static int64_t tend(int64_t now_ms) {
    int64_t next = now_ms + 100;
    for (int i = 0; i < count; i++) {
        stream *s = &streams[i];
        if (s->over) continue;
        if (s->fd < 0) {
            if (now_ms >= s->start_ms) start(s);
            else if (s->start_ms < next) next = s->start_ms;
            continue;
        }
        if (s->kind == SLOW && now_ms >= s->next_ms) {
            s->next_ms = now_ms + SLOW_MS;
            take(s, SLOW_BYTES);
        }
        if (s->kind == LEAVER && s->next_ms && now_ms >= s->next_ms) {
            struct linger hard = {1, 0};
            if (i & 1) setsockopt(s->fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
            left_early++;
            finish(s);
        }
    }
    return next;
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static double quantile(double q) {
    return gap_count ? gaps[(long)(q * (gap_count - 1))] / 1000.0 : 0.0;
}

int main(int argc, char **argv) {
    if (argc != 9) return 2;
    address.sin_family = AF_INET;
    address.sin_port = htons(atoi(argv[2]));
    inet_pton(AF_INET, argv[1], &address.sin_addr);
    FILE *file = fopen(argv[3], "rb");
    if (!file) return 2;
    request_size = fread(request, 1, sizeof request, file);
    healthy = atoi(argv[4]);
    int slow = atoi(argv[5]), leavers = atoi(argv[6]), span = atoi(argv[7]), ramp = atoi(argv[8]);
    count = healthy + slow + leavers;
    streams = calloc(count, sizeof *streams);
    poller = epoll_create1(0);
    int64_t begin = now_ns() / 1000000;
    for (int i = 0; i < count; i++) {
        stream *s = &streams[i];
        s->fd = -1;
        s->kind = i < healthy ? HEALTHY : i < healthy + slow ? SLOW : LEAVER;
        int place = s->kind == HEALTHY ? i : s->kind == SLOW ? i - healthy : i - healthy - slow;
        int of = s->kind == HEALTHY ? healthy : s->kind == SLOW ? slow : leavers;
        int over = s->kind == LEAVER ? span : s->kind == SLOW ? 5 * ramp : ramp;
        s->start_ms = begin + (int64_t)over * place / of;
    }
    struct epoll_event ready[MORE];
    int64_t last = now_ns() / 1000000, next = 0;
    while (ended < healthy) {
        int64_t ms = now_ns() / 1000000;
        if (ms >= next) next = tend(ms);
        int n = epoll_wait(poller, ready, MORE, next > ms ? next - ms : 0);
        int64_t before = now_ns();
        for (int i = 0; i < n; i++) {
            stream *s = ready[i].data.ptr;
            if (s->over) continue;
            if (s->kind == HEALTHY) last = before / 1000000;
            take(s, 1 << 18);
        }
        busy_ns += now_ns() - before;
        if (before / 1000000 - last > WAIT_MS) break;
    }
    int64_t done = now_ns();
    if (ended < healthy) failed += healthy - ended;
    qsort(gaps, gap_count, sizeof *gaps, by_size);
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu = (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e6 + used.ru_utime.tv_usec + used.ru_stime.tv_usec;
    printf("{\"ns\": %lld, \"tokens\": %ld, \"events\": %ld, \"bytes\": %lld, \"failed\": %d, \"refused\": %d, \"slow_refused\": %d, \"connected\": %d, "
           "\"left\": %d, \"dropped\": %d, \"gaps\": %ld, \"gap_p50_ms\": %.3f, \"gap_p99_ms\": %.3f, "
           "\"gap_max_ms\": %.3f, \"cpu_us\": %.0f}\n",
           (long long)done, tokens, events, (long long)bytes, failed, refused, slow_refused, connected, left_early, dropped, gap_count,
           quantile(0.5), quantile(0.99), quantile(1.0), cpu);
    return failed ? 1 : 0;
}

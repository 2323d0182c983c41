// Helpers on cores that neighbours lend while they have nothing to compute.
//
// The workers of a machine share a byte for each core that an engine has claimed, its state. The
// owner's engine sets it to `lent` before it sleeps, and to `in_use` before it computes. A neighbour
// that computes borrows a lent core for as long as the state says so: it looks before each piece, so
// the owner waits for a piece that was begun. The state that a killed worker leaves behind does little
// harm. If it is `lent`, no engine has the core. Else nobody borrows it until its next owner computes.
//
// A helper is a thread for one core, which starts with the first call. It sleeps until it is called,
// looks for pieces without sleeping while calls follow each other, and gives the core back `kRest` after
// the last one. A helper that does not get its core, as something else runs there, is waited for, and
// then left alone for `kAside`.

#include "team.h"

#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <vector>

#include <immintrin.h>

namespace {

// As in core_sharing.py. 0 is a core that no engine has claimed.
enum State : uint8_t { kLent = 1, kInUse = 2, kBorrowed = 3 };

constexpr int64_t kRest = 300'000;  // ns without a piece after which a helper sleeps
constexpr int kLooks = 64;          // at an offer, between two at the clock
constexpr int kPauses = 20'000;     // for a helper's last piece, before others may have the core
constexpr int64_t kAside = 10'000'000;  // ns without offers to a helper that was waited for longer

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

struct Helper {
    std::atomic<uint8_t> *state;  // of its core
    int core;
    std::atomic<int64_t> *helped;
    bool has_thread = false;
    int64_t aside_until = 0;  // ns: its core has other work, so it is left alone
    std::atomic<bool> at_pieces{false};
    std::atomic<Pieces *> offered{nullptr};
    std::atomic<uint32_t> awake{0};
};

// The helpers of one engine. They live as long as the process, as they may compute while it exits.
struct Helpers {
    std::vector<Helper *> all;
    std::atomic<int64_t> helped{0};  // pieces that they have computed
};

// Of the engine that computes on this thread; null while it may not borrow.
thread_local Helpers *helpers = nullptr;

void help(Helper &helper, Pieces &pieces) {
    int64_t done = 0;
    while (helper.state->load(std::memory_order_relaxed) == kBorrowed) {
        const int64_t piece = pieces.take(1);
        if (piece < 0) break;
        pieces.work(pieces.context, piece);
        ++done;
    }
    *helper.helped += done;
    helper.at_pieces.store(false, std::memory_order_relaxed);
    pieces.helpers.fetch_sub(1, std::memory_order_release);  // the pieces may be gone behind this
}

// While the core is borrowed: takes what is offered, until nothing was for some time.
void look_for_pieces(Helper &helper) {
    int64_t idle_since = now_ns();
    while (helper.state->load(std::memory_order_relaxed) == kBorrowed) {
        for (int look = 0; look < kLooks; ++look) {
            if (helper.offered.load(std::memory_order_relaxed)) break;
            _mm_pause();
        }
        if (Pieces *pieces = helper.offered.exchange(nullptr, std::memory_order_acquire)) {
            helper.at_pieces.store(true, std::memory_order_relaxed);
            help(helper, *pieces);
            idle_since = now_ns();
        } else if (now_ns() - idle_since > kRest) {
            return;
        }
    }
}

void run(Helper *helper) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(helper->core, &cores);
    if (sched_setaffinity(0, sizeof cores, &cores)) return;  // it stays awake, and takes nothing
    for (;;) {
        while (!helper->awake.load(std::memory_order_acquire))
            syscall(SYS_futex, &helper->awake, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
        look_for_pieces(*helper);
        helper->awake.store(0, std::memory_order_release);
        uint8_t borrowed = kBorrowed;  // else the owner has taken it back already
        helper->state->compare_exchange_strong(borrowed, kLent);
    }
}

bool wake(Helper &helper) {
    uint8_t lent = helper.state->load(std::memory_order_relaxed);
    if (lent != kLent || !helper.state->compare_exchange_strong(lent, kBorrowed)) return false;
    helper.awake.store(1, std::memory_order_release);
    if (!helper.has_thread) {
        helper.has_thread = true;
        try {
            std::thread(run, &helper).detach();  // with the priority of the thread that computes
        } catch (const std::system_error &) {
            // the process may have no more threads: the helper stays awake, and takes nothing
        }
        return true;
    }
    syscall(SYS_futex, &helper.awake, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    return true;
}

}  // namespace

int team_size(int threads) {
    if (!helpers) return threads;
    int size = threads;
    const int64_t now = now_ns();
    for (const Helper *helper : helpers->all) {
        if (helper->aside_until > now) continue;
        const uint8_t state = helper->state->load(std::memory_order_relaxed);
        size += state == kLent || (state == kBorrowed && helper->awake.load(std::memory_order_relaxed));
    }
    return size;
}

void offer(Pieces &pieces) {
    if (!helpers) return;
    for (Helper *helper : helpers->all) {
        if (helper->aside_until && helper->aside_until > now_ns()) continue;
        helper->aside_until = 0;
        if (!helper->awake.load(std::memory_order_relaxed) && !wake(*helper)) continue;
        pieces.helpers.fetch_add(1, std::memory_order_relaxed);
        helper->offered.store(&pieces, std::memory_order_release);
    }
}

void withdraw(Pieces &pieces) {
    if (!pieces.helpers.load(std::memory_order_acquire)) return;
    for (Helper *helper : helpers->all)
        if (helper->offered.exchange(nullptr)) pieces.helpers.fetch_sub(1);
    for (int pauses = 0; pieces.helpers.load(std::memory_order_acquire); ++pauses)
        if (pauses < kPauses) {
            _mm_pause();
        } else {
            if (pauses == kPauses)
                for (Helper *helper : helpers->all)
                    if (helper->at_pieces.load(std::memory_order_relaxed))
                        helper->aside_until = now_ns() + kAside;
            sched_yield();
        }
}

// Makes a helper for each of `cores`, for one engine. `states` are those of all cores, in memory that all
// engines of the machine share, and that stays mapped.
extern "C" void *make_helpers(uint8_t *states, const int *cores, int count) {
    auto *made = new Helpers;
    for (int i = 0; i < count; ++i)
        made->all.push_back(
            new Helper{(std::atomic<uint8_t> *)(states + cores[i]), cores[i], &made->helped});
    return made;
}

// Whose help the calls of this thread get from now on; null: nobody's. One thread at a time may have
// the same helpers.
extern "C" void use_helpers(void *made) { helpers = (Helpers *)made; }

// How many pieces they have computed.
extern "C" int64_t helped_pieces(void *made) { return ((Helpers *)made)->helped; }

// Helpers on cores that neighbours lend while they have nothing to compute.
//
// The workers of a machine share a byte for each core that an engine has claimed, its state. The
// owner's engine sets it to `lent` before it sleeps, and to `in_use` before it computes. A neighbour
// that computes borrows a lent core for as long as the state says so: it looks before each piece, so
// the owner waits for one piece at most. A state that a killed worker leaves behind does no harm: as
// `lent` or `borrowed` the core is idle in fact or lost to borrowers until its next owner computes.
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
    bool has_thread = false;
    int64_t aside_until = 0;  // ns: its core has other work, so it is left alone
    std::atomic<bool> works{false};
    std::atomic<Pieces *> offered{nullptr};
    std::atomic<uint32_t> awake{0};
};

// As long as the process lives: threads may compute while it exits.
std::vector<Helper *> &helpers = *new std::vector<Helper *>;
std::atomic<bool> may_borrow{false};
std::atomic<int64_t> helped{0};

void help(Helper &helper, Pieces &pieces) {
    int64_t done = 0;
    while (helper.state->load(std::memory_order_relaxed) == kBorrowed) {
        const int64_t piece = pieces.take(1);
        if (piece < 0) break;
        pieces.work(pieces.context, piece);
        ++done;
    }
    helped += done;
    helper.works.store(false, std::memory_order_relaxed);
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
            helper.works.store(true, std::memory_order_relaxed);
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
        std::thread(run, &helper).detach();  // with the priority of the thread that computes
        return true;
    }
    syscall(SYS_futex, &helper.awake, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    return true;
}

}  // namespace

int team_size(int threads) {
    int size = threads;
    const int64_t now = now_ns();
    if (may_borrow.load(std::memory_order_relaxed))
        for (const Helper *helper : helpers) {
            const uint8_t state = helper->state->load(std::memory_order_relaxed);
            if (helper->aside_until > now) continue;
            size += state == kLent || (state == kBorrowed && helper->awake.load(std::memory_order_relaxed));
        }
    return size;
}

void offer(Pieces &pieces) {
    if (!may_borrow.load(std::memory_order_relaxed)) return;
    for (Helper *helper : helpers) {
        if (helper->aside_until && helper->aside_until > now_ns()) continue;
        helper->aside_until = 0;
        if (!helper->awake.load(std::memory_order_relaxed) && !wake(*helper)) continue;
        pieces.helpers.fetch_add(1, std::memory_order_relaxed);
        Pieces *nothing = nullptr;  // else another thread of this process computes, too
        if (!helper->offered.compare_exchange_strong(nothing, &pieces, std::memory_order_release))
            pieces.helpers.fetch_sub(1, std::memory_order_relaxed);
    }
}

void withdraw(Pieces &pieces) {
    if (!pieces.helpers.load(std::memory_order_acquire)) return;
    for (Helper *helper : helpers) {
        Pieces *mine = &pieces;
        if (helper->offered.compare_exchange_strong(mine, nullptr)) pieces.helpers.fetch_sub(1);
    }
    for (int pauses = 0; pieces.helpers.load(std::memory_order_acquire); ++pauses)
        if (pauses < kPauses) {
            _mm_pause();
        } else {
            if (pauses == kPauses)
                for (Helper *helper : helpers)
                    if (helper->works.load(std::memory_order_relaxed))
                        helper->aside_until = now_ns() + kAside;
            sched_yield();
        }
}

// Makes a helper for each of `cores`, once in a process. `states` are those of all cores, in memory that
// all workers of the machine share, and that stays mapped.
extern "C" void make_helpers(uint8_t *states, const int *cores, int count) {
    for (int i = 0; i < count; ++i)
        helpers.push_back(new Helper{(std::atomic<uint8_t> *)(states + cores[i]), cores[i]});
}

// Whether calls from now on are offered to helpers. One thread makes calls, and this one.
extern "C" void allow_borrowing(int allowed) { may_borrow = allowed != 0; }

// How many pieces helpers have computed since the process began.
extern "C" int64_t helped_pieces() { return helped; }

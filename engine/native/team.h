// A call's pieces, shared out among the threads that compute it.
//
// These are a worker's own threads, and helpers on cores of its neighbours for as long as those have
// nothing to compute (team.cpp). Which thread computes a piece changes no bit of it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <omp.h>

struct Pieces {
    void (*work)(const void *context, int64_t piece);
    const void *context;
    int64_t count;
    std::atomic<int64_t> taken[2] = {{0}, {0}};  // of the first half of the pieces, and of the second
    std::atomic<int> helpers{0};                 // to whom they are offered, or who are at them

    // The next piece of a half, or of the other one; -1 if none is left. So each of two threads gets one
    // piece behind the other: the CPU reads ahead, and kernels fetch the weights of the next one.
    int64_t take(int half) {
        const int64_t middle = (count + 1) / 2, sizes[2] = {middle, count - middle};
        for (int i = 0; i < 2; ++i, half = 1 - half)
            if (const int64_t piece = taken[half]++; piece < sizes[half]) return half * middle + piece;
        return -1;
    }

    // Does pieces until none is left, those of one half first.
    void work_through(int half) {
        for (int64_t piece = take(half); piece >= 0; piece = take(half)) work(context, piece);
    }
};

// How many threads can compute now: `threads`, and helpers whose cores are idle.
int team_size(int threads);

// Offers the pieces to the helpers whose cores are idle.
void offer(Pieces &pieces);

// Takes the offer back, and waits until no helper is at a piece.
void withdraw(Pieces &pieces);

// Calls `work` with each of 0..count-1, on `threads` threads and on those of borrowed cores.
template <class Work>
void share_out(int64_t count, int threads, const Work &work) {
    Pieces pieces{[](const void *context, int64_t piece) { (*(const Work *)context)(piece); }, &work,
                  count};
    if (count > 1) offer(pieces);
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
    pieces.work_through(omp_get_thread_num() % 2);
    if (count > 1) withdraw(pieces);
}

constexpr int64_t kRowsOfPiece = 16;

// Calls `work` with each row; little is to be done for one, so a piece has several.
template <class Work>
void share_out_rows(int64_t rows, int threads, const Work &work) {
    share_out((rows + kRowsOfPiece - 1) / kRowsOfPiece, threads, [&](int64_t piece) {
        const int64_t end = std::min(rows, (piece + 1) * kRowsOfPiece);
        for (int64_t row = piece * kRowsOfPiece; row < end; ++row) work(row);
    });
}

// Linear layers on AVX512-BF16 whose rows do not depend on the rows beside them.
//
// Every sum is over pairs of inputs in order, by one instruction for each pair, whatever the number of
// rows. Up to six rows share registers, never sums. So few rows cost one read of the weights.

#include "team.h"
#include "vectors.h"

namespace {

constexpr int kVectors = 4;           // of 16 outputs each, in a panel
constexpr int kPanel = 16 * kVectors;  // outputs whose sums are four registers for each row
constexpr int kPairLines = kPanel * 4 / 64;  // cache lines of a panel's weights of a pair of inputs
constexpr int kRows = 6;              // rows that share registers: 24 sums, 4 weights, 1 input
constexpr int64_t kCached = 1 << 18;  // bf16 elements of rows that stay in L2
constexpr int64_t kDepth = 48;        // pairs of inputs whose weights of a panel stay in L1

struct Call {
    const uint32_t *weight;     // panels [N/64][K/2][64] of pairs: two neighbouring inputs of an output
    const float *bias;          // [N] or null
    const uint16_t *residual;   // [rows, N] or null: added after rounding
    uint16_t *out;              // [rows, N], or [rows, N/2] if gated
    int64_t inputs, outputs;
    bool gated;                 // even vectors of 16 are gates, odd ones what they gate
};

// Rounds a row's finished sums of a panel into the output.
void finish(const Call &c, int64_t row, int64_t panel, const float *finished) {
    const int64_t column = panel * kPanel;
    Floats sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = load(finished + 16 * v);
    if (c.bias)
        for (int v = 0; v < kVectors; ++v) sums[v] = add(sums[v], load(c.bias + column + 16 * v));
    if (c.gated) {
        uint16_t *out = c.out + row * (c.outputs / 2) + column / 2;
        for (int v = 0; v < kVectors; v += 2) {
            const Floats gate = round_bf16(silu(round_bf16(sums[v])));
            store_bf16(out + 8 * v, multiply(gate, round_bf16(sums[v + 1])));
        }
        return;
    }
    const int64_t at = row * c.outputs + column;
    for (int v = 0; v < kVectors; ++v) {
        if (c.residual) sums[v] = add(round_bf16(sums[v]), load_bf16(c.residual + at + 16 * v));
        store_bf16(c.out + at + 16 * v, sums[v]);
    }
}

// Weights that are fetched while others are multiplied: with every `pairs_apart`th pair of inputs (a
// power of 2) the next `lines` cache lines, up to `end`.
struct Ahead {
    uintptr_t at, end;
    int lines;
    int64_t pairs_apart;

    inline void fetch(int64_t pair) {
        if (pair & (pairs_apart - 1)) return;
        for (int i = 0; i < lines && at < end; ++i, at += 64) _mm_prefetch((const char *)at, _MM_HINT_T1);
    }
};

// sums [R][64] += R rows from `x` on, each `stride` behind the one before, times `pairs` pairs of inputs
// of a panel. Fresh sums are 0 before.
template <int R>
void product(const uint16_t *x, int64_t stride, const uint32_t *weight, int64_t pairs, float *sums,
             bool fresh, Ahead &ahead) {
    __m512 sum[R][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] = fresh ? zeros() : load(sums + r * kPanel + 16 * v);
    for (int64_t k = 0; k < pairs; ++k, weight += kPanel) {
        ahead.fetch(k);
        __m512i w[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) w[v] = _mm512_loadu_si512(weight + 16 * v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            int32_t pair;
            std::memcpy(&pair, x + r * stride + 2 * k, sizeof pair);
            const __m512bh input = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v)
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], input, (__m512bh)w[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(sums + r * kPanel + 16 * v, sum[r][v]);
}

// Rows `first`..`last` times one panel, while the next one is fetched. Where weights are used more than
// once, a part of them stays in L1 for all rows.
void multiply_panel(const Call &c, const uint16_t *x, int64_t stride, int64_t first, int64_t last,
                    int64_t panel, float *sums) {
    const int64_t pairs = c.inputs / 2;
    const int64_t passes = (last - first + kRows - 1) / kRows;  // so often each weight is used
    const int64_t depth = passes > 1 ? kDepth : pairs;
    const uint32_t *weight = c.weight + panel * pairs * kPanel;
    const uintptr_t next = (uintptr_t)(weight + pairs * kPanel);
    Ahead ahead{next, next + pairs * kPanel * 4, 1, 1};
    if (passes == 1)
        ahead.lines = 0;  // weights that are read once, one after the other: the CPU fetches them itself
    else if (passes < kPairLines)
        ahead.lines = (int)((kPairLines + passes - 1) / passes);
    else
        while (ahead.pairs_apart * 2 * kPairLines <= passes) ahead.pairs_apart *= 2;
    for (int64_t k = 0; k < pairs; k += depth) {
        const int64_t part = std::min(depth, pairs - k);
        for (int64_t row = first; row < last; row += kRows) {
            const uint16_t *from = x + row * stride + 2 * k;
            const uint32_t *w = weight + k * kPanel;
            float *to = sums + (row - first) * kPanel;
            const bool fresh = k == 0;
            const int rows = (int)std::min<int64_t>(kRows, last - row);
            switch (rows) {
                case 1: product<1>(from, stride, w, part, to, fresh, ahead); break;
                case 2: product<2>(from, stride, w, part, to, fresh, ahead); break;
                case 3: product<3>(from, stride, w, part, to, fresh, ahead); break;
                case 4: product<4>(from, stride, w, part, to, fresh, ahead); break;
                case 5: product<5>(from, stride, w, part, to, fresh, ahead); break;
                case 6: product<6>(from, stride, w, part, to, fresh, ahead); break;
            }
            if (k + part == pairs)
                for (int r = 0; r < rows; ++r) finish(c, row + r, panel, to + r * kPanel);
        }
    }
}

}  // namespace

// `normalised` holds rows * inputs elements; inputs are a multiple of 16, outputs of 64.
extern "C" void linear_avx512(const uint16_t *x, int64_t x_row, int64_t rows, const uint16_t *norm,
                              float eps, const uint32_t *weight, const float *bias,
                              const uint16_t *residual, uint16_t *out, int64_t inputs,
                              int64_t outputs, int gated, uint16_t *normalised, int threads) {
    const Call c{weight, bias, residual, out, inputs, outputs, gated != 0};
    // blocks of rows are as equal as can be: each of them reads all weights
    const int64_t cached_rows = std::max<int64_t>(kCached / inputs, kRows);
    const int64_t blocks = std::max<int64_t>((rows + cached_rows - 1) / cached_rows, 1);
    const int64_t equal_rows = ((rows + blocks - 1) / blocks + kRows - 1) / kRows * kRows;
    const int64_t block_rows = std::max<int64_t>(equal_rows, kRows);
    const int64_t panels = outputs / kPanel;
    const uint16_t *read = norm ? normalised : x;
    const int64_t read_row = norm ? inputs : x_row;
    if (norm)
        share_out_rows(rows, threads, [&](int64_t row) {
            normalise(x + row * x_row, norm, normalised + row * inputs, inputs, eps);
        });
    share_out((rows + block_rows - 1) / block_rows * panels, threads, [&](int64_t piece) {
        thread_local Buffer<float> buffer;
        const int64_t first = piece / panels * block_rows;
        const int64_t last = std::min(rows, first + block_rows);
        multiply_panel(c, read, read_row, first, last, piece % panels,
                       buffer.at_least(block_rows * kPanel));
    });
}

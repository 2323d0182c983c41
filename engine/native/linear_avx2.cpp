// Linear layers on AVX2 whose rows do not depend on the rows beside them.
//
// Weights are bf16 and are widened to float32 as they are read. Every sum is over the inputs in order,
// by fused multiply-adds, whatever the number of rows. Up to six rows share the widened weights.

#include "team.h"
#include "vectors.h"

namespace {

constexpr int kPanel = 16;            // outputs whose sums are two registers for each row
constexpr int kPanelWords = 8;        // 32-bit words for each input of a panel, two outputs in each
constexpr int kRows = 6;              // rows that share registers: 12 sums, 2 weights, 1 input
constexpr int kUnitPanels = 4;        // panels that a thread takes at a time
constexpr int64_t kCached = 1 << 16;  // float32 of rows that stay in L2

struct Call {
    const uint16_t *x, *norm;   // [rows, K], [K] or null
    const uint32_t *weight;     // panels [N/16][K][8] of pairs: outputs j (low half) and j + 8
    const float *bias;          // [N] or null
    const uint16_t *residual;   // [rows, N] or null: added after rounding
    uint16_t *out;              // [rows, N], or [rows, N/2] if gated
    int64_t rows, inputs, outputs, x_row;
    float eps;
    bool gated;                 // low halves are gates, high ones what they gate
};

// Rows of x, normalised if asked, as float32 [rows / 6][K][6]. What is missing of six is not written.
void pack(const Call &c, int64_t row, float *packed) {
    const uint16_t *x = c.x + row * c.x_row;
    float *to = packed + row / kRows * kRows * c.inputs + row % kRows;
    Floats scale = all(1.0f);
    if (c.norm) {
        Floats squares = zeros();
        for (int64_t i = 0; i < c.inputs; i += kFloats) {
            const Floats v = load_bf16(x + i);
            squares = multiply_add(v, v, squares);
        }
        scale = all(1.0f / std::sqrt(sum_lanes(squares) / c.inputs + c.eps));
    }
    for (int64_t i = 0; i < c.inputs; i += kFloats) {
        Floats v = load_bf16(x + i);
        if (c.norm) v = round_bf16(multiply(round_bf16(multiply(v, scale)), load_bf16(c.norm + i)));
        alignas(32) float values[kFloats];
        store(values, v);
        for (int lane = 0; lane < kFloats; ++lane) to[(i + lane) * kRows] = values[lane];
    }
}

// Rounds a row's finished sums of a panel into the output.
inline void finish(const Call &c, int64_t row, int64_t panel, Floats low, Floats high) {
    const int64_t column = panel * kPanel;
    if (c.bias) {
        low = add(low, load(c.bias + column));
        high = add(high, load(c.bias + column + kFloats));
    }
    if (c.gated) {
        const Floats gate = round_bf16(silu(round_bf16(low)));
        store_bf16(c.out + row * (c.outputs / 2) + column / 2, multiply(gate, round_bf16(high)));
        return;
    }
    if (c.residual) {
        const uint16_t *residual = c.residual + row * c.outputs + column;
        low = add(round_bf16(low), load_bf16(residual));
        high = add(round_bf16(high), load_bf16(residual + kFloats));
    }
    uint16_t *out = c.out + row * c.outputs + column;
    store_bf16(out, low);
    store_bf16(out + kFloats, high);
}

// R rows, packed in `x`, times P panels.
template <int R, int P>
void product(const Call &c, const float *x, int64_t row, int64_t panel) {
    Floats low[P][R], high[P][R];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) low[p][r] = high[p][r] = zeros();
    const uint32_t *weight = c.weight + panel * c.inputs * kPanelWords;
    for (int64_t i = 0; i < c.inputs; ++i, x += kRows, weight += kPanelWords)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
            const EvenAndOdd w = load_even_and_odd(weight + p * c.inputs * kPanelWords);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Floats input = _mm256_broadcast_ss(x + r);
                low[p][r] = multiply_add(input, w.even, low[p][r]);
                high[p][r] = multiply_add(input, w.odd, high[p][r]);
            }
        }
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) finish(c, row + r, panel + p, low[p][r], high[p][r]);
}

// Up to six rows times `panels` panels. Few rows take several panels at a time, as each multiply-add
// waits for the one before it of its sum.
void block(const Call &c, const float *x, int64_t row, int rows, int64_t panel, int panels) {
    int p = 0;
    if (rows == 1)
        for (; p + 4 <= panels; p += 4) product<1, 4>(c, x, row, panel + p);
    if (rows == 2)
        for (; p + 2 <= panels; p += 2) product<2, 2>(c, x, row, panel + p);
    for (; p < panels; ++p) switch (rows) {
            case 1: product<1, 1>(c, x, row, panel + p); break;
            case 2: product<2, 1>(c, x, row, panel + p); break;
            case 3: product<3, 1>(c, x, row, panel + p); break;
            case 4: product<4, 1>(c, x, row, panel + p); break;
            case 5: product<5, 1>(c, x, row, panel + p); break;
            case 6: product<6, 1>(c, x, row, panel + p); break;
        }
}

}  // namespace

// `packed` holds ceil(rows / 6) * 6 * inputs floats; inputs are a multiple of 8, outputs of 16.
extern "C" void linear_avx2(const uint16_t *x, int64_t x_row, int64_t rows, const uint16_t *norm,
                            float eps, const uint32_t *weight, const float *bias,
                            const uint16_t *residual, uint16_t *out, int64_t inputs, int64_t outputs,
                            int gated, float *packed, int threads) {
    const Call c{x, norm, weight, bias, residual, out, rows, inputs, outputs, x_row, eps, gated != 0};
    const int64_t cached_rows = std::max<int64_t>(kCached / inputs / kRows * kRows, kRows);
    const int64_t panels = outputs / kPanel;
    const int64_t units = (panels + kUnitPanels - 1) / kUnitPanels;
    // rows that are packed together are one piece's
    share_out((rows + kRows - 1) / kRows, threads, [&](int64_t piece) {
        const int64_t end = std::min(rows, (piece + 1) * kRows);
        for (int64_t row = piece * kRows; row < end; ++row) pack(c, row, packed);
    });
    share_out((rows + cached_rows - 1) / cached_rows * units, threads, [&](int64_t piece) {
        const int64_t first = piece / units * cached_rows;
        const int64_t last = std::min(rows, first + cached_rows);
        const int64_t panel = piece % units * kUnitPanels;
        const int count = (int)std::min<int64_t>(kUnitPanels, panels - panel);
        for (int64_t row = first; row < last; row += kRows)
            block(c, packed + row * inputs, row, (int)std::min<int64_t>(kRows, last - row), panel,
                  count);
    });
}

// Linear layers on AMX whose rows do not depend on the rows beside them.
//
// A tile product sums over 32 inputs in an order of its own and adds that to the accumulator; tiles
// follow each other in the order of the inputs, whatever the number of rows. oneDNN changes that
// order with the number of rows, so a row's last bits would depend on its neighbours.

#include "common.h"
#include "team.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t kTile = 512;   // bf16 elements of a tile: 16 rows of 32
constexpr int64_t kCached = 1 << 19;  // elements of rows that stay in L2
constexpr int64_t kDepth = 8;   // tiles of K that stay in L1 with one panel of weights
constexpr int64_t kAhead = 32;   // tiles of weights on their way, where each is used once

struct Call {
    const uint16_t *x, *norm, *weight;  // [rows, K], [K] or null, panels [N/32][K/32][2][16][16] pairs
    const float *bias;                  // [N] or null
    const uint16_t *residual;           // [rows, N] or null: added after rounding
    uint16_t *out;                      // [rows, N], or [rows, N/2] if gated
    int64_t rows, inputs, outputs, x_row;
    float eps;
    bool gated;                         // even tiles of 16 are gates, odd ones what they gate
};

// Rows of x, normalised if asked, as tiles [rows/32][K/32][2][16][32]; missing rows are zero.
void pack(const Call &c, int64_t row, uint16_t *packed) {
    const int64_t depth = c.inputs / 32;
    uint16_t *to = packed + (row / 32 * depth * 2 + row % 32 / 16) * kTile + row % 16 * 32;
    if (row >= c.rows) {
        for (int64_t k = 0; k < depth; ++k) _mm512_storeu_si512(to + k * 2 * kTile, _mm512_setzero_si512());
        return;
    }
    const uint16_t *x = c.x + row * c.x_row;
    if (!c.norm) {
        for (int64_t k = 0; k < depth; ++k)
            _mm512_storeu_si512(to + k * 2 * kTile, _mm512_loadu_si512(x + 32 * k));
        return;
    }
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < c.inputs; i += 16) {
        const __m512 v = load_bf16(x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(sum_lanes(squares) / c.inputs + c.eps));
    for (int64_t i = 0; i < c.inputs; i += 16) {
        const __m512 v = round_bf16(_mm512_mul_ps(load_bf16(x + i), scale));
        store_bf16(to + i / 32 * 2 * kTile + i % 32, _mm512_mul_ps(v, load_bf16(c.norm + i)));
    }
}

// C [32][32] += A [32][32 * depth] B [32 * depth][32]; with `one`, only the first 16 rows. With every
// step in depth, `lines` cache lines from `ahead` on are fetched.
template <bool one>
inline void product(const uint16_t *a, const uint16_t *b, int64_t depth, float *c, bool fresh,
                    const char *ahead, int lines) {
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, c, 128);
        _tile_loadd(1, c + 16, 128);
        if (!one) {
            _tile_loadd(2, c + 512, 128);
            _tile_loadd(3, c + 528, 128);
        }
    }
    for (int64_t k = 0; k < depth; ++k, a += 2 * kTile, b += 2 * kTile) {
        for (int i = 0; i < lines; ++i, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + kTile, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (!one) {
            _tile_loadd(5, a + kTile, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    if (!one) {
        _tile_stored(2, c + 512, 128);
        _tile_stored(3, c + 528, 128);
    }
}

// Rounds rows of a finished C [32][32] into columns `column`.. of the output.
void finish(const Call &c, const float *sums, int64_t row, int64_t rows, int64_t column) {
    for (int64_t r = 0; r < rows; ++r, sums += 32) {
        __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + 16);
        if (c.bias) {
            low = _mm512_add_ps(low, _mm512_loadu_ps(c.bias + column));
            high = _mm512_add_ps(high, _mm512_loadu_ps(c.bias + column + 16));
        }
        if (c.gated) {
            const __m512 gate = round_bf16(silu(round_bf16(low)));
            store_bf16(c.out + (row + r) * (c.outputs / 2) + column / 2,
                       _mm512_mul_ps(gate, round_bf16(high)));
            continue;
        }
        uint16_t *out = c.out + (row + r) * c.outputs + column;
        if (c.residual) {
            const uint16_t *residual = c.residual + (row + r) * c.outputs + column;
            low = _mm512_add_ps(round_bf16(low), load_bf16(residual));
            high = _mm512_add_ps(round_bf16(high), load_bf16(residual + 16));
        }
        store_bf16(out, low);
        store_bf16(out + 16, high);
    }
}

// Rows `first`..`last` against one panel of 32 outputs, while the next one is fetched.
void panel(const Call &c, const uint16_t *packed, int64_t first, int64_t last, int64_t column,
           float *sums) {
    const int64_t depth = c.inputs / 32;
    const int64_t step = last - first > 64 ? kDepth : depth;
    const uint16_t *weight = c.weight + column * c.inputs;
    const int64_t tiles = (last - first + 31) / 32;  // of rows: so often each weight is used
    const char *ahead = (const char *)(weight + (tiles > 1 ? 2 * depth : kAhead) * kTile);
    const int lines = (int)((32 + tiles - 1) / tiles);
    for (int64_t k = 0; k < depth; k += step) {
        const int64_t part = std::min(step, depth - k);
        for (int64_t row = first; row < last; row += 32) {
            const uint16_t *a = packed + (row / 32 * depth + k) * 2 * kTile;
            float *tile = sums + (row - first) * 32;
            if (last - row <= 16)
                product<true>(a, weight + k * 2 * kTile, part, tile, k == 0, ahead, lines);
            else
                product<false>(a, weight + k * 2 * kTile, part, tile, k == 0, ahead, lines);
            ahead += part * lines * 64;
            if (k + part == depth) finish(c, tile, row, std::min<int64_t>(32, last - row), column);
        }
    }
}

}  // namespace

// `packed` holds ceil(rows / 32) * 32 * inputs elements; inputs and outputs are multiples of 32.
extern "C" void linear_amx(const uint16_t *x, int64_t x_row, int64_t rows, const uint16_t *norm,
                           float eps, const uint16_t *weight, const float *bias,
                           const uint16_t *residual, uint16_t *out, int64_t inputs,
                           int64_t outputs, int gated, uint16_t *packed, int threads) {
    const Call c{x, norm, weight, bias, residual, out, rows, inputs, outputs, x_row, eps, gated != 0};
    const int64_t block = std::max<int64_t>(kCached / inputs / 32 * 32, 32);
    const int64_t padded = (rows + 15) / 16 * 16;
    const int64_t columns = outputs / 32;
    share_out_rows(padded, threads, [&](int64_t row) { pack(c, row, packed); });
    share_out((rows + block - 1) / block * columns, threads, [&](int64_t piece) {
        thread_local Buffer<float> buffer;
        const Tiles tiles;
        const int64_t first = piece / columns * block;
        panel(c, packed, first, std::min(rows, first + block), piece % columns * 32,
              buffer.at_least((block + 31) / 32 * 32 * 32));
    });
}

// Asks Linux for the tiles' state (ARCH_REQ_XCOMP_PERM, XTILEDATA); 0 when they may be used.
extern "C" int64_t allow_amx() { return syscall(SYS_arch_prctl, 0x1023, 18); }

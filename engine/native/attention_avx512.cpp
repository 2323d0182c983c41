// Paged attention for CPUs with AVX512-BF16: prefill and decode with one reduction order per row.
//
// A row (one query token, one head) walks its pages from 0, 64 keys at a time, with an online
// softmax. Scores are summed over pairs of dims in order, values over pairs of keys in order; rows
// share registers, never sums. So a row's bits depend on its query and its keys alone, whatever
// rows are computed beside it, in prefill or decode. Keys behind a row change nothing: every
// weight of them is 0, and the correction factor of a page of them is exactly 1.
//
// Up to 6 rows share registers: 6 x 4 sums are the 24 independent ones that keep both multipliers
// busy, and leave 4 registers for keys or values and one for the row's side.

#include "attention.h"
#include "common.h"

namespace {

constexpr int kVectors = 4;      // of 16 keys each
constexpr int kRows = 6;         // rows that share registers
constexpr int kItemRows = 768;   // rows of one item, at most: they share a page's packing
constexpr float kNone = -INFINITY;
constexpr float kLog2e = 1.44269504089f;

// 2^x for x <= 0 and -inf, which gives 0; NaN stays NaN.
inline __m512 exp2_negative(__m512 x) { return exp2_ps(_mm512_max_ps(_mm512_set1_ps(-200.0f), x)); }

inline __m512 dot(__m512 sum, __m512i pairs, uint32_t pair) {
    return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(pair));
}

// Asks for `count` numbers of a page that is needed soon: the CPU reads them while it computes.
inline void fetch(const uint16_t *numbers, int count) {
    for (int i = 0; i < count; i += 32) _mm_prefetch((const char *)(numbers + i), _MM_HINT_T1);
}

// K page [64][dim] -> [dim / 2][64] pairs, by 16 x 16 transposes of 32-bit pairs; fetches page `next`.
void pack_keys(const uint16_t *page, const uint16_t *next, int dim, uint32_t *packed) {
    for (int key = 0; key < kPage; key += 16)
        for (int pair = 0; pair < dim / 2; pair += 16) {
            transpose(page + key * dim + pair * 2, dim * 2, packed + pair * kPage + key, kPage * 4);
            fetch(next, 512);
            next += 512;
        }
}

// V page [64][dim] -> [32][dim] pairs of neighbouring keys. Keys from `used` on are 0: a weight of 0
// does not hide what is no number. Fetches page `next`.
void pack_values(const uint16_t *page, const uint16_t *next, int dim, int64_t used, uint32_t *packed) {
    for (int pair = 0; pair < kPage / 2; ++pair) {
        fetch(next + 2 * pair * dim, 2 * dim);
        for (int d = 0; d < dim; d += 16) {
            const uint16_t *low = page + 2 * pair * dim + d;
            const __mmask16 first = 2 * pair < used ? 0xffff : 0, second = 2 * pair + 1 < used ? 0xffff : 0;
            const __m512i a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first, low));
            const __m512i b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(second, low + dim));
            const __m512i both = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
            _mm512_storeu_si512(packed + pair * dim + d, both);
        }
    }
}

// A query token's head, while its pages are walked.
struct Row {
    const uint16_t *q;
    uint16_t *out;
    int64_t position;
    float most, sum;             // largest score so far, sum of 2^(score - most)
    float *acc;                  // [dim] sum of weights times values
    alignas(64) uint32_t weights[kPage / 2];  // of the keys of one page, pairs of bf16
};

// Makes scores of the page's keys that `row` does not see -inf.
inline void hide(const Shape &s, const Row &row, __m512 *scores, int64_t first) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int last = (int)std::min<int64_t>(row.position - first, kPage);
    const int low = s.window ? (int)std::max<int64_t>(row.position - s.window - first, -1) : -1;
    for (int i = 0; i < kVectors; ++i) {
        const __m512i key = _mm512_add_epi32(lanes, _mm512_set1_epi32(16 * i));
        const __mmask16 seen = _mm512_cmple_epi32_mask(key, _mm512_set1_epi32(last)) &
                               _mm512_cmpgt_epi32_mask(key, _mm512_set1_epi32(low));
        scores[i] = _mm512_mask_mov_ps(_mm512_set1_ps(kNone), seen, scores[i]);
    }
}

// Softmax weights of R rows, each of which sees a key of the page; `scores` are not scaled yet.
// What corrects the sums over earlier pages goes to `correction` [16].
template <int R>
inline void weigh(const Shape &s, Row *rows, __m512 (*scores)[kVectors], float *correction) {
    alignas(64) float before[16] = {}, most[16] = {};
    const __m512 scale = _mm512_set1_ps(s.scale);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const __m512 top = _mm512_max_ps(_mm512_max_ps(scores[r][0], scores[r][1]),
                                         _mm512_max_ps(scores[r][2], scores[r][3]));
        before[r] = rows[r].most;
        most[r] = std::max(rows[r].most, _mm512_reduce_max_ps(top) * s.scale);
    }
    __m512 total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        total[r] = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
            const __m512 score = _mm512_fmsub_ps(scores[r][i], scale, _mm512_set1_ps(most[r]));
            const __m512 weight = exp2_negative(score);
            total[r] = _mm512_add_ps(total[r], weight);
            _mm256_store_si256((__m256i *)rows[r].weights + i, narrow(weight));
        }
    }
    const __m512 fallen = _mm512_sub_ps(_mm512_load_ps(before), _mm512_load_ps(most));
    _mm512_store_ps(correction, exp2_negative(fallen));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        // named: whether a compiler fuses the two may depend on R
        rows[r].sum = std::fma(rows[r].sum, correction[r], _mm512_reduce_add_ps(total[r]));
        rows[r].most = most[r];
    }
}

// acc = acc * correction + weights * values, for R rows and 16 * V dims from `d` on.
template <int R, int V>
inline void accumulate(const Shape &s, Row *rows, const float *correction, const uint32_t *values,
                       int d, int pairs) {
    __m512 acc[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i)
            acc[r][i] = _mm512_mul_ps(_mm512_loadu_ps(rows[r].acc + d + 16 * i),
                                      _mm512_set1_ps(correction[r]));
    const uint32_t *value = values + d;
    for (int pair = 0; pair < pairs; ++pair, value += s.dim) {
        __m512i v[V];
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) v[i] = _mm512_loadu_si512(value + 16 * i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) acc[r][i] = dot(acc[r][i], v[i], rows[r].weights[pair]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) _mm512_storeu_ps(rows[r].acc + d + 16 * i, acc[r][i]);
}

// One page for R rows of ascending positions, each of which sees a key of it.
template <int R>
void page(const Shape &s, Row *rows, const uint32_t *keys, const uint32_t *values, int64_t first) {
    __m512 scores[R][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) scores[r][i] = _mm512_setzero_ps();
    const uint16_t *q[R];
    for (int r = 0; r < R; ++r) q[r] = rows[r].q;
    for (int pair = 0; pair < s.dim / 2; ++pair) {
        __m512i k[kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) k[i] = _mm512_loadu_si512(keys + pair * kPage + 16 * i);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            uint32_t both;
            std::memcpy(&both, q[r] + 2 * pair, 4);
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) scores[r][i] = dot(scores[r][i], k[i], both);
        }
    }
    const int64_t low = rows[0].position, high = rows[R - 1].position;
    if (low < first + kPage - 1 || (s.window && first <= high - s.window))
        for (int r = 0; r < R; ++r) hide(s, rows[r], scores[r], first);
    alignas(64) float correction[16];
    weigh<R>(s, rows, scores, correction);
    // keys behind the last row have no weight
    const int pairs = (int)std::min<int64_t>(kPage / 2, (high - first) / 2 + 1);
    int d = 0;
    for (; d + 64 <= s.dim; d += 64) accumulate<R, 4>(s, rows, correction, values, d, pairs);
    for (; d < s.dim; d += 32) accumulate<R, 2>(s, rows, correction, values, d, pairs);
}

// One page for up to kRows rows of ascending positions, less those at both ends that see no key.
void any_page(const Shape &s, Row *rows, int count, const uint32_t *keys, const uint32_t *values,
              int64_t first) {
    while (count && first > rows[0].position) ++rows, --count;
    while (count && s.window && first + kPage - 1 <= rows[count - 1].position - s.window) --count;
    switch (count) {
        case 1: return page<1>(s, rows, keys, values, first);
        case 2: return page<2>(s, rows, keys, values, first);
        case 3: return page<3>(s, rows, keys, values, first);
        case 4: return page<4>(s, rows, keys, values, first);
        case 5: return page<5>(s, rows, keys, values, first);
        case 6: return page<6>(s, rows, keys, values, first);
    }
}

void finish(const Shape &s, const Row &row) {
    const __m512 inverse = _mm512_set1_ps(1.0f / row.sum);
    for (int d = 0; d < s.dim; d += 16) {
        const __m512 value = _mm512_mul_ps(_mm512_loadu_ps(row.acc + d), inverse);
        _mm256_storeu_si256((__m256i *)(row.out + d), (__m256i)_mm512_cvtneps_pbh(value));
    }
}

// The heads of a page lie one after the other, so they are walked in that order.
void work(const Shape &s, const Item &item) {
    thread_local std::vector<uint32_t> keys, values;
    thread_local std::vector<float> acc;
    thread_local std::vector<Row> rows;
    const int group = s.heads / s.kv_heads, total = item.count * group;
    keys.resize(s.dim / 2 * kPage);
    values.resize(kPage / 2 * s.dim);
    acc.assign((size_t)item.heads * total * s.dim, 0.0f);
    rows.resize(item.heads * total);
    for (int i = 0; i < item.heads * total; ++i) {
        const int head = item.head + i / total, of_head = i % total;
        const int64_t t = item.row + of_head / group, column = (int64_t)(head * group + of_head % group) * s.dim;
        Row &row = rows[i];
        row.q = s.q + t * s.q_row + column;
        row.out = s.out + t * s.out_row + column;
        row.position = item.start + of_head / group;
        row.most = kNone;
        row.sum = 0.0f;
        row.acc = acc.data() + (size_t)i * s.dim;
    }
    const int64_t oldest = s.window ? std::max<int64_t>(item.start - s.window + 1, 0) : 0;
    const int64_t last = (item.start + item.count - 1) / kPage;
    const auto place = [&](int64_t p, int h) { return item.table[p] * s.block + (item.head + h) * s.head; };
    int64_t base = place(oldest / kPage, 0);
    fetch(s.k + base, kPage * s.dim);
    fetch(s.v + base, kPage * s.dim);
    for (int64_t p = oldest / kPage; p <= last; ++p)
        for (int h = 0; h < item.heads; ++h) {
            int64_t next = base;  // behind the last page there is none: this one is in a cache by now
            if (h + 1 < item.heads) next = place(p, h + 1);
            else if (p < last) next = place(p + 1, 0);
            pack_keys(s.k + base, s.k + next, s.dim, keys.data());
            pack_values(s.v + base, s.v + next, s.dim, item.start + item.count - p * kPage, values.data());
            for (int r = 0; r < total; r += kRows)
                any_page(s, &rows[h * total + r], std::min(kRows, total - r), keys.data(), values.data(),
                         p * kPage);
            base = next;
        }
    for (const Row &row : rows) finish(s, row);
}

}  // namespace

// Spans: (first row of the step, rows, first position, offset of its block table) each.
extern "C" void attention_avx512(const uint16_t *q, const uint16_t *k, const uint16_t *v,
                                uint16_t *out, int64_t q_row, int64_t out_row, int64_t block,
                                int64_t head, const int64_t *spans, int64_t count,
                                const int64_t *table, int heads, int kv_heads, int dim,
                                int window, float scale, int threads) {
    const Shape s{q, k, v, out, q_row, out_row, block, head, table,
                  heads, kv_heads, dim, window, scale * kLog2e};
    for_each_item(s, spans, count, threads, kItemRows, [&](const Item &item) { work(s, item); });
}

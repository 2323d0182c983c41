// Paged attention on AMX: prefill and decode with one reduction order per row.
//
// A row (one query token, one head) walks its pages from 0, 64 keys at a time, with an online
// softmax. Up to sixteen rows share a tile, in prefill all of them; in decode as many as there are
// query heads to a KV head, and tiles and softmax are as narrow. A row is a column of the scores and
// a row of the output, and its sums have the same order at every width, so its bits depend on its
// query and its keys alone. Pages behind a row change nothing: every weight in them is 0 and the
// correction factor is exactly 1.
//
// Decode is bound by reading KV. A page to come is asked for in small portions between all other
// work: in bursts the core has too few line buffers, and without requests under way memory is idle.

#include "common.h"
#include "team.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int kPage = 64;      // keys of a page
constexpr int kLanes = 16;     // of a vector; rows of a tile at most
constexpr int kItem = 128;     // rows of a work item
constexpr int kAhead = 1;      // pages that are on their way, where each is used by one tile
constexpr float kHidden = -1e37f;  // score of a key that a row does not see: its weight is 0
constexpr float kNone = -1e30f;    // reference of a row that has seen no key
constexpr float kSlack = 8.0f;     // a weight may grow to 2^8 before sums move to a new reference

struct Shape {
    const uint16_t *q, *k, *v;
    uint16_t *out;
    int64_t q_row, out_row;    // elements between query tokens
    int64_t block, head;       // elements between KV blocks, KV heads
    int heads, kv_heads, dim, window;
    float scale;               // of scores, times log2(e)
};

// The page to come, fetched a few lines at a time.
struct Ahead {
    const char *keys = nullptr, *values = nullptr;
    int left = 0;              // pairs of lines

    void some(int count) {
        if (left <= 0) return;
        left -= count;
        for (; count > 0; --count, keys += 64, values += 64) {
            _mm_prefetch(keys, _MM_HINT_T1);
            _mm_prefetch(values, _MM_HINT_T1);
        }
    }
};

// Where the tiles of a page of keys are: rows `row` bytes apart, the next 16 keys and the next 32
// dims so many elements on. A tile whose rows lie 256 bytes apart loads seven times slower.
struct Keys {
    const uint16_t *at;
    int64_t row, sixteen, depth;
};

// V page [64][dim] -> tiles [2][dim / 16][16 pairs of keys, one 16 behind the other][16]. Keys from
// `used` on are 0: a weight of 0 does not hide what is no number. Of 32 columns a tile has those of
// the even quarters of each 16 bytes, the next tile the odd ones; `finish` puts them in order.
void pack_values(const uint16_t *page, int dim, int64_t used, uint32_t *packed, Ahead &ahead) {
    for (int key = 0; key < (used <= 32 ? 32 : 64); key += key % 16 == 15 ? 17 : 1) {
        const __mmask32 first = key < used ? ~0u : 0, second = key + 16 < used ? ~0u : 0;
        ahead.some(1);
        for (int d = 0; d < dim; d += 32) {
            const uint16_t *at = page + key * dim + d;
            const __m512i a = _mm512_maskz_loadu_epi16(first, at);
            const __m512i b = _mm512_maskz_loadu_epi16(second, at + 16 * dim);
            uint32_t *to = packed + (key / 32 * dim + d) * 16 + key % 16 * 16;
            _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(to + 256, _mm512_unpackhi_epi16(a, b));
        }
    }
}

// K page [64][dim] as it lies, or as tiles [dim / 32][4][16 keys][32].
Keys find_keys(const uint16_t *page, int dim, uint16_t *packed) {
    if (dim <= 64) return {page, dim * 2, 16 * dim, 32};
    for (int key = 0; key < kPage; ++key)
        for (int d = 0; d < dim; d += 32)
            _mm512_store_si512(packed + d * kPage + key * 32, _mm512_loadu_si512(page + key * dim + d));
    return {packed, 64, 512, kPage * 32};
}

// Up to R rows of one KV head and what is known of their softmax. A vector of scores has the R rows
// of 16 / R keys: lane l is of row l % R. Sums are of the keys that are equal modulo 16, so they have
// one order for every R.
struct Lanes {
    alignas(64) int32_t position[kLanes];
    alignas(64) float reference[kLanes];  // weights are 2^(score - reference)
    alignas(64) float sums[16 * kLanes];  // [16 remainders][R]
    uint32_t *query;           // [dim / 2][R] pairs
    float *acc;                // tiles [dim / 16][R rows][16]
};

// Tiles 0 and 1 are scores, 2 and 3 outputs, 4 and 5 keys or values, 6 a query, 7 weights.
template <int R>
void shape_tiles() {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) shapes.set(i, 16, 64);
    for (int i : {0, 1, 6}) shapes.set(i, 16, 4 * R);
    for (int i : {2, 3, 7}) shapes.set(i, R, 64);
    shapes.load();
}

// Scores [32 keys][R] against half a page of keys, which begins at `at`.
template <int R>
void score(const Shape &s, const uint32_t *query, const Keys &keys, const uint16_t *at, float *scores,
           Ahead &ahead) {
    _tile_zero(0);
    _tile_zero(1);
    for (int d = 0; d < s.dim; d += 32, at += keys.depth) {
        _tile_loadd(6, query + d / 2 * R, 4 * R);
        _tile_loadd(4, at, keys.row);
        _tile_dpbf16ps(0, 4, 6);
        ahead.some(6);
        _tile_loadd(5, at + keys.sixteen, keys.row);
        _tile_dpbf16ps(1, 5, 6);
        ahead.some(6);
    }
    _tile_stored(0, scores, 4 * R);
    _tile_stored(1, scores + 16 * R, 4 * R);
}

// Hides the keys behind each lane's position and before its window.
template <int R>
void hide(const Shape &s, const Lanes &lanes, int64_t first, int keys, float *scores) {
    const __m512i position = _mm512_load_si512(lanes.position);
    const __m512i oldest = s.window ? _mm512_sub_epi32(position, _mm512_set1_epi32(s.window))
                                    : _mm512_set1_epi32(-1);
    alignas(64) int32_t at[16];
    for (int i = 0; i < 16; ++i) at[i] = (int32_t)first + i / R;
    __m512i key = _mm512_load_si512(at);
    for (int i = 0; i < keys * R; i += 16) {
        const __mmask16 hidden =
            _mm512_cmpgt_epi32_mask(key, position) | _mm512_cmple_epi32_mask(key, oldest);
        _mm512_mask_storeu_ps(scores + i, hidden, _mm512_set1_ps(kHidden));
        key = _mm512_add_epi32(key, _mm512_set1_epi32(16 / R));
    }
}

// The largest of the lanes of each row, in all of them.
template <int R>
__m512 largest(__m512 x) {
    if (R <= 8) x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    if (R <= 4) x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    if (R <= 2) x = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4e));
    if (R <= 1) x = _mm512_max_ps(x, _mm512_permute_ps(x, 0xb1));
    return x;
}

// Moves a row's sums to a new reference where its scores have outgrown the old one.
template <int R>
__m512 refer(const Shape &s, Lanes &lanes, const float *scores, int keys) {
    __m512 top[2] = {_mm512_loadu_ps(scores), _mm512_loadu_ps(scores + 16)};
    for (int i = 32; i < keys * R; i += 32)
        for (int j = 0; j < 2; ++j)
            top[j] = _mm512_max_ps(top[j], _mm512_loadu_ps(scores + i + 16 * j));
    const __m512 most = largest<R>(_mm512_max_ps(top[0], top[1]));
    const __m512 old = _mm512_load_ps(lanes.reference);
    const __m512 wanted = _mm512_mul_ps(most, _mm512_set1_ps(s.scale));
    const __mmask16 grown =
        _mm512_cmp_ps_mask(wanted, _mm512_add_ps(old, _mm512_set1_ps(kSlack)), _CMP_GT_OQ);
    if (!grown) return old;
    const __m512 reference = _mm512_mask_mov_ps(old, grown, wanted);
    alignas(64) float factors[16];
    const __m512 correction = exp2_ps(_mm512_sub_ps(old, reference));
    _mm512_store_ps(factors, correction);
    _mm512_store_ps(lanes.reference, reference);
    for (int i = 0; i < R; ++i) {
        float *sums = lanes.sums + 16 * i;
        _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), correction));
    }
    for (int row = 0; row < R; ++row)
        for (int d = 0; (grown >> row & 1) && d < s.dim; d += 16) {
            float *acc = lanes.acc + d * R + row * 16;
            _mm512_storeu_ps(acc, _mm512_mul_ps(_mm512_loadu_ps(acc), _mm512_set1_ps(factors[row])));
        }
    return reference;
}

// [16][R] 32-bit elements -> [R][16]. Each step turns the bits of their numbers by one.
template <int R>
inline void part_rows(__m512i *x) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int step = 1; step < R; step *= 2) {
        __m512i from[R];
        for (int i = 0; i < R; ++i) from[i] = x[i];
        for (int i = 0; i < R / 2; ++i) {
            x[i] = _mm512_permutex2var_epi32(from[2 * i], even, from[2 * i + 1]);
            x[i + R / 2] = _mm512_permutex2var_epi32(from[2 * i], odd, from[2 * i + 1]);
        }
    }
}

// Softmax weights of 32 or 64 keys as tiles [R rows][16 pairs].
template <int R>
void weigh(const Shape &s, Lanes &lanes, const float *scores, int keys, uint32_t *weights,
           Ahead &ahead) {
    const __m512 reference = refer<R>(s, lanes, scores, keys), factor = _mm512_set1_ps(s.scale);
    const __m512i order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005,
                                            0x160006, 0x170007, 0x180008, 0x190009, 0x1a000a, 0x1b000b,
                                            0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    for (; keys > 0; keys -= 32, scores += 32 * R, weights += 16 * R) {
        __m512i pairs[R];
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            ahead.some((R + 3) / R);
            const float *at = scores + 16 * i;
            const __m512 a = exp2_ps(_mm512_fmsub_ps(_mm512_loadu_ps(at), factor, reference));
            const __m512 b = exp2_ps(_mm512_fmsub_ps(_mm512_loadu_ps(at + 16 * R), factor, reference));
            float *sums = lanes.sums + 16 * i;
            _mm512_store_ps(sums, _mm512_add_ps(_mm512_add_ps(_mm512_load_ps(sums), a), b));
            pairs[i] = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
        part_rows<R>(pairs);
        for (int i = 0; i < R; ++i) _mm512_store_si512(weights + 16 * i, pairs[i]);
    }
}

// acc += weights [R][keys] values [keys][32 columns].
template <int R>
void gather(const uint32_t *weights, const uint32_t *values, int keys, int dim, float *acc,
            Ahead &ahead) {
    _tile_loadd(2, acc, 64);
    _tile_loadd(3, acc + 16 * R, 64);
    for (; keys > 0; keys -= 32, weights += 16 * R, values += 16 * dim) {
        _tile_loadd(7, weights, 64);
        _tile_loadd(4, values, 64);
        _tile_dpbf16ps(2, 7, 4);
        ahead.some(5);
        _tile_loadd(5, values + 256, 64);
        _tile_dpbf16ps(3, 7, 5);
        ahead.some(5);
    }
    _tile_stored(2, acc, 64);
    _tile_stored(3, acc + 16 * R, 64);
}

struct Scratch {
    Buffer<uint32_t> queries, values;
    Buffer<uint16_t> packed, rows;
    Buffer<float> acc;
    std::vector<Lanes> lanes;
    alignas(64) float scores[kPage * kLanes];
    alignas(64) uint32_t weights[2 * 16 * 16];
    Ahead ahead;
};

// R rows see the page whose first key is at position `first`. A half that no row sees is left out:
// its weights would be 0.
template <int R>
void step(const Shape &s, Scratch &scratch, Lanes &lanes, const Keys &keys, int64_t first) {
    const int64_t low = lanes.position[0], high = lanes.position[kLanes - 1];
    if (first > high || (s.window && first + kPage - 1 <= low - s.window)) return;
    const int count = high - first < kPage / 2 ? kPage / 2 : kPage;
    const uint32_t *values = scratch.values.data();
    __asm__ volatile("" ::: "memory");  // tile loads do not say that they read memory
    for (int key = 0; key < count; key += 32)
        score<R>(s, lanes.query, keys, keys.at + key / 16 * keys.sixteen, scratch.scores + key * R,
                 scratch.ahead);
    if (first + kPage - 1 > low || (s.window && first <= high - s.window))
        hide<R>(s, lanes, first, count, scratch.scores);
    weigh<R>(s, lanes, scratch.scores, count, scratch.weights, scratch.ahead);
    __asm__ volatile("" ::: "memory");
    for (int d = 0; d < s.dim; d += 32)
        gather<R>(scratch.weights, values + d * 16, count, s.dim, lanes.acc + d * R, scratch.ahead);
}

// Query tokens `row`..`row + count` of the step, first position `start`, some KV heads.
struct Item {
    int64_t row, start;
    const int64_t *table;
    int count, head, heads;

    int64_t first(const Shape &s) const {
        return s.window ? std::max<int64_t>(start - s.window + 1, 0) / kPage : 0;
    }
    int64_t last() const { return (start + count - 1) / kPage; }
    int64_t page(const Shape &s, int64_t p, int h) const { return table[p] * s.block + (head + h) * s.head; }
    int64_t used(int64_t p) const { return std::min<int64_t>(start + count - p * kPage, kPage); }
    int rows(const Shape &s) const { return count * (s.heads / s.kv_heads); }  // of each head
    int tiles(const Shape &s) const { return (rows(s) + kLanes - 1) / kLanes; }
};

// R rows from `first` on of the item's head `h`; lanes without a row repeat the last one.
template <int R>
void fill(const Shape &s, const Item &item, int h, int first, uint16_t *rows, Lanes &lanes) {
    const int group = s.heads / s.kv_heads;
    for (int i = 0; i < R; ++i) {
        const int row = std::min(first + i, item.rows(s) - 1);
        const uint16_t *q = s.q + (item.row + row / group) * s.q_row +
                            (int64_t)((item.head + h) * group + row % group) * s.dim;
        std::memcpy(rows + i * s.dim, q, s.dim * 2);
        for (int lane = i; lane < kLanes; lane += R)
            lanes.position[lane] = (int32_t)(item.start + row / group);
    }
    std::fill(lanes.reference, lanes.reference + kLanes, kNone);
    std::fill(lanes.sums, lanes.sums + 16 * R, 0.0f);
    if constexpr (R == 16) {
        for (int d = 0; d < s.dim; d += 32)
            transpose(rows + d, s.dim * 2, lanes.query + d / 2 * R, 64);
        return;
    }
    for (int i = 0; i < R; ++i)
        for (int pair = 0; pair < s.dim / 2; ++pair)
            std::memcpy(lanes.query + pair * R + i, rows + i * s.dim + 2 * pair, 4);
}

// The item's rows as lanes: all tiles of its first head, then of the next.
template <int R>
void begin(const Shape &s, Scratch &to, const Item &item) {
    const int tiles = item.tiles(s);
    const size_t one = (size_t)R * s.dim, size = item.heads * tiles * one;
    uint32_t *queries = to.queries.at_least(size / 2);
    float *acc = to.acc.at_least(size);
    std::fill(acc, acc + size, 0.0f);
    to.packed.at_least(kPage * s.dim);
    to.values.at_least(kPage / 2 * s.dim);
    uint16_t *rows = to.rows.at_least(one);
    to.lanes.resize(item.heads * tiles);
    for (int at = 0; at < item.heads * tiles; ++at) {
        to.lanes[at].query = queries + at * one / 2;
        to.lanes[at].acc = acc + at * one;
        fill<R>(s, item, at / tiles, at % tiles * R, rows, to.lanes[at]);
    }
}

template <int R>
void finish(const Shape &s, Scratch &from, const Item &item) {
    const int group = s.heads / s.kv_heads, total = item.rows(s);
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (Lanes &lanes : from.lanes)
        for (int half = 8 * R; half >= R; half /= 2)
            for (int i = 0; i < half; ++i) lanes.sums[i] += lanes.sums[half + i];
    for (int i = 0; i < item.heads * total; ++i) {
        const int h = i / total, row = i % total;
        const Lanes &lanes = from.lanes[h * item.tiles(s) + row / R];
        const float *acc = lanes.acc + row % R * 16;
        const __m512 inverse = _mm512_set1_ps(1.0f / lanes.sums[row % R]);
        uint16_t *out = s.out + (item.row + row / group) * s.out_row +
                        (int64_t)((item.head + h) * group + row % group) * s.dim;
        for (int d = 0; d < s.dim; d += 32) {
            const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(acc + d * R), inverse);
            const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(acc + (d + 16) * R), inverse);
            store_bf16(out + d, _mm512_permutex2var_ps(a, low, b));
            store_bf16(out + d + 16, _mm512_permutex2var_ps(a, high, b));
        }
    }
}

// What is read a few pages after page `p` of head `h`: of the heads to come, then of the pages, then
// of the next item.
Ahead after(const Shape &s, const Item &item, int64_t p, int h, const Item &next) {
    int64_t page = p + (h + kAhead) / item.heads;
    const Item &which = page <= item.last() ? item : next;
    if (page > item.last()) page = std::min(page - item.last() - 1 + next.first(s), next.last());
    const int64_t at = which.page(s, page, std::min((h + kAhead) % item.heads, which.heads - 1));
    return {(const char *)(s.k + at), (const char *)(s.v + at), (int)(which.used(page) * s.dim / 32)};
}

// One item; `next` is likely the thread's next one. Inlined, it would look for its thread's scratch
// again and again.
template <int R>
__attribute__((noinline)) void work(const Shape &s, Scratch &scratch, const Item &item, const Item &next) {
    const int tiles = item.tiles(s);
    shape_tiles<R>();
    begin<R>(s, scratch, item);
    for (int64_t p = item.first(s); p <= item.last(); ++p)
        for (int h = 0; h < item.heads; ++h) {
            const int64_t base = item.page(s, p, h);
            if (tiles == 1) scratch.ahead = after(s, item, p, h, next);  // more have enough to do
            const Keys keys = find_keys(s.k + base, s.dim, scratch.packed.data());
            pack_values(s.v + base, s.dim, item.used(p), scratch.values.data(), scratch.ahead);
            for (int tile = 0; tile < tiles; ++tile)
                step<R>(s, scratch, scratch.lanes[h * tiles + tile], keys, p * kPage);
            scratch.ahead.some(scratch.ahead.left);
        }
    finish<R>(s, scratch, item);
}

// The narrowest `work` for so many rows of a head.
auto pick(int rows) {
    return rows > 8 ? work<16> : rows > 4 ? work<8> : rows > 2 ? work<4> : rows > 1 ? work<2> : work<1>;
}

}  // namespace

// Spans: (first row of the step, rows, first position, offset of its block table) each.
extern "C" void attention_amx(const uint16_t *q, const uint16_t *k, const uint16_t *v,
                              uint16_t *out, int64_t q_row, int64_t out_row, int64_t block,
                              int64_t head, const int64_t *spans, int64_t count,
                              const int64_t *table, int heads, int kv_heads, int dim, int window,
                              float scale, int threads) {
    const Shape s{q,     k,        v,   out,    q_row, out_row, block, head,
                  heads, kv_heads, dim, window, scale * 1.44269504089f};
    std::vector<Item> items;
    const int tokens = std::max(kItem / (heads / kv_heads), 1);
    const int sharers = team_size(threads);
    const int most = count >= 4 * sharers ? kv_heads : std::max(kv_heads / sharers, 1);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t *span = spans + 4 * i;
        for (int64_t t = 0; t < span[1]; t += tokens) {
            const int rows = (int)std::min<int64_t>(tokens, span[1] - t);
            const int together = rows * (heads / kv_heads) <= kLanes ? most : 1;
            for (int h = 0; h < kv_heads; h += together)
                items.push_back({span[0] + t, span[2] + t, table + span[3], rows, h,
                                 std::min(together, kv_heads - h)});
        }
    }
    std::stable_sort(items.begin(), items.end(), [](const Item &a, const Item &b) {
        return (a.start + a.count) * a.count * a.heads > (b.start + b.count) * b.count * b.heads;
    });  // the longest first: no thread is left with one of them at the end
    const int64_t all = items.size();
    share_out(all, threads, [&](int64_t i) {
        thread_local Scratch scratch;
        const Tiles tiles;
        pick(items[i].rows(s))(s, scratch, items[i], items[std::min(i + 1, all - 1)]);
    });
}

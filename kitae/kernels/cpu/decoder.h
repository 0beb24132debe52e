// A decoder on packed weights, for both kinds of numbers, and the products of float32. Included by cpu.cpp.
//
// What differs between the kinds is in a "unit": `Panels` here, for float on any processor, and `Tiles` in amx.h, for
// bfloat16 on tile registers. Both compute a product block by block and hand each block, in floats, to a function that
// rounds it and puts it where the next part wants it. The left operand is "blocked": [blocks of rows][K / LINE][height]
// lines of 64 bytes, so that the rows of a block are a fixed distance apart, whatever K is. The right operand is
// "packed" in panels of columns. All functions here except the exported ones run within a parallel region.

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// Floats of one register, and rows of a block: as many as leave registers for two parts of the right operand.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, MOST_ROWS = 14;
#elif defined(__AVX__)
constexpr int WIDTH = 8, MOST_ROWS = 6;
#elif defined(__aarch64__)
constexpr int WIDTH = 4, MOST_ROWS = 12;
#else
constexpr int WIDTH = 4, MOST_ROWS = 6;
#endif
constexpr int PANEL = 2 * WIDTH;
typedef float part __attribute__((vector_size(4 * WIDTH)));
typedef int32_t part_bits __attribute__((vector_size(4 * WIDTH)));

inline int64_t tiles(int64_t n, int64_t size) { return (n + size - 1) / size; }

inline part load_part(const float* p) {
    part v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline float sum_of(part v) {
    float total = 0;
    for (int i = 0; i < WIDTH; i++) total += v[i];
    return total;
}

// The same as exp_negative, for any x between -87 and 87.
inline part exp_of(part x) {
#if defined(__AVX512F__)
    const part n = (part)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const part y = x * 1.44269504f, half = part{} + 0.5f;
    const part_bits whole = __builtin_convertvector(y + (y < 0.0f ? -half : half), part_bits);
    const part n = __builtin_convertvector(whole, part);
#endif
    const part r = x - n * 0.693145752f - n * 1.42860677e-6f;
    const part p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666672f + r * (0.0416666418f + r * (0.00833345205f + r * 0.00138889f)))));
#if defined(__AVX512F__)
    return (part)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (part)((whole + 127) << 23);
#endif
}
inline part bounded(part x) {
    const part most = part{} + 87.0f;
    x = x > most ? most : x;
    return x < -most ? -most : x;
}

// Where number (row, column) of a left operand [rows, K] is. With a height of 1 these are plain rows.
template <typename T>
struct Blocked {
    static constexpr int64_t LINE = 64 / sizeof(T);
    T* base;
    int64_t K, height;
    T* at(int64_t row, int64_t column) const {
        const int64_t line = (row / height * (K / LINE) + column / LINE) * height + row % height;
        return base + line * LINE + column % LINE;
    }
};

// Sixteen rows of sixteen words, transposed; rows that are not there are zeros.
inline void transpose(const void* from, int64_t stride, int64_t rows, void* to, int64_t to_stride) {
#if defined(__AVX512F__)
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++)
        r[i] = i < rows ? _mm512_loadu_si512((const char*)from + i * stride) : _mm512_setzero_si512();
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            r[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
            r[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
        }
    for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    }
    const auto put = [&](int i, __m512i row) { _mm512_storeu_si512((char*)to + i * to_stride, row); };
    for (int j = 0; j < 4; j++) {
        put(j, _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88));
        put(4 + j, _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88));
        put(8 + j, _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd));
        put(12 + j, _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd));
    }
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < WIDTH; j++) {
            uint32_t word = 0;
            if (j < rows) memcpy(&word, (const char*)from + j * stride + i * 4, 4);
            memcpy((char*)to + i * to_stride + j * 4, &word, 4);
        }
#endif
}

// R rows times a panel, of a depth that is a multiple of 16; more: added to what the block has. Every sum is made in the
// order of K, whatever R is, so a row does not depend on those around it. Of what is read next in memory, `ahead` lines
// for each 16 of K are fetched.
template <int R>
void panel_block(const float* left, int64_t height, const float* right, int64_t depth, float* block, bool more,
                 const float* next, int64_t ahead) {
    constexpr int64_t LINE = 16, SOON = 8 * PANEL;
    part sums[R][2] = {};
    for (int64_t k = 0; k < depth; k += LINE) {
#pragma GCC unroll 1
        for (int i = 0; i < LINE; i++) {
            const part a = load_part(right + i * PANEL), b = load_part(right + i * PANEL + WIDTH);
            for (int line = 0; line < PANEL; line += 16) __builtin_prefetch(right + i * PANEL + SOON + line);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const float x = left[r * LINE + i];
                sums[r][0] += x * a;
                sums[r][1] += x * b;
            }
        }
        for (int64_t line = 0; line < ahead; line++, next += 16) __builtin_prefetch(next, 0, 2);
        left += height * LINE;
        right += LINE * PANEL;
    }
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++) {
            float* target = block + r * PANEL + h * WIDTH;
            const part sum = more ? load_part(target) + sums[r][h] : sums[r][h];
            memcpy(target, &sum, sizeof sum);
        }
}

template <int... I>
auto panel_block_of(int64_t rows, std::integer_sequence<int, I...>) {
    static constexpr auto all = {panel_block<I + 1>...};
    return all.begin()[rows - 1];
}

// Float: panels are [columns / PANEL][K][PANEL].
struct Panels {
    typedef float T;
    struct Registers {
        explicit Registers(int64_t) {}
    };
    static part load(const float* p) { return load_part(p); }
    static void put(float* p, part x) { memcpy(p, &x, sizeof x); }
    static part rounded(part x) { return x; }
    // Blocks of about the same height, so that none has a few rows only.
    static int64_t height(int64_t rows) { return tiles(rows, tiles(rows, MOST_ROWS)); }

    // As much of both operands as stays in the second cache. Sums of a whole row of thousands would also be less exact.
    static constexpr int64_t ROWS = 280, DEPTH = 384;

    // put(block, row, rows, column, columns) gets [rows][PANEL] floats. A thread that finds nothing more to do goes on.
    template <typename Put>
    static void begin_product(const Blocked<float>& left, const float* right, int64_t M, int64_t N, const Put& put) {
        const int64_t K = left.K, height = left.height, blocks = tiles(M, height), panels = tiles(N, PANEL);
        const int64_t parts = tiles(blocks, ROWS / height), each = tiles(blocks, parts);
        const int64_t width = std::max<int64_t>(1, std::min<int64_t>(4, panels * parts / (8 * omp_get_num_threads())));
        const int64_t jobs = tiles(panels, width), cut = tiles(tiles(K, tiles(K, DEPTH)), 16) * 16;
        alignas(64) float block[ROWS * PANEL];
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t job = 0; job < parts * jobs; job++) {
            const int64_t begin = job / jobs * each, end = std::min(blocks, begin + each), count = end - begin;
            const int64_t row = begin * height, rows = std::min(M, end * height) - row;
            const int64_t ahead = count > 1 ? tiles(PANEL, count) : 0;
            for (int64_t panel = job % jobs * width; panel < std::min(panels, (job % jobs + 1) * width); panel++) {
                for (int64_t k = 0; k < K; k += cut) {
                    const int64_t depth = std::min(cut, K - k);
                    const float *here = right + (panel * K + k) * PANEL, *after = here + depth * PANEL;
                    for (int64_t b = 0; b < count; b++) {
                        const int64_t most = std::min(height, M - (begin + b) * height);
                        const auto run = panel_block_of(most, std::make_integer_sequence<int, MOST_ROWS>{});
                        run(left.base + (begin + b) * height * K + k * height, height, here, depth,
                            block + b * height * PANEL, k > 0, after + b * ahead * depth, ahead);
                    }
                }
                put(block, row, rows, panel * PANEL, std::min<int64_t>(PANEL, N - panel * PANEL));
            }
        }
    }

    // The transpose of a weight [N, K] as a right operand. `first` and `step` count in units of WIDTH columns.
    static void pack(const float* weight, int64_t N, int64_t K, float* packed, int64_t first, int64_t step) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles(N, WIDTH); t++) {
            const int64_t unit = first + t * step;
            for (int64_t k = 0; k < K; k += 16)
                transpose(weight + t * WIDTH * K + k, K * sizeof(float), N - t * WIDTH,
                          packed + (unit / 2 * K + k) * PANEL + unit % 2 * WIDTH, PANEL * sizeof(float));
        }
    }

#if defined(__AVX512F__)
    typedef __m512 Line;
    static Line line(const float* p) { return _mm512_loadu_ps(p); }
    static __m512 add_dot(__m512 sum, Line a, Line b) { return _mm512_fmadd_ps(a, b, sum); }
#endif
};

// A product that is whole when it returns.
template <typename Unit, typename Put, typename T = typename Unit::T>
void product(const Blocked<T>& left, const T* right, int64_t M, int64_t N, const Put& put) {
    Unit::begin_product(left, right, M, N, put);
#pragma omp barrier
}

// What becomes of a block: out = round(block + bias), rows of `width`.
template <typename Unit>
struct PutRows {
    typedef typename Unit::T T;
    T* out;
    int64_t width;
    const T* bias;
    void operator()(const float* block, int64_t row, int64_t rows, int64_t column, int64_t columns) const {
        for (int64_t half = 0; half < columns; half += WIDTH) {
            T* target = out + row * width + column + half;
            if (columns - half >= WIDTH) {
                const part shift = bias ? Unit::load(bias + column + half) : part{};
                for (int64_t i = 0; i < rows; i++)
                    Unit::put(target + i * width, load_part(block + i * PANEL + half) + shift);
            } else {
                for (int64_t i = 0; i < rows; i++)
                    for (int64_t j = 0; j < columns - half; j++)
                        store(target + i * width + j,
                              block[i * PANEL + half + j] + (bias ? ::load(bias + column + half + j) : 0.0f));
            }
        }
    }
};

// x = round(x + round(round(block + bias) * factor)); the width is a multiple of 16.
template <typename Unit>
struct AddRows {
    typedef typename Unit::T T;
    T* x;
    int64_t width;
    const T* bias;
    float factor;
    void operator()(const float* block, int64_t row, int64_t rows, int64_t column, int64_t columns) const {
        for (int64_t half = 0; half < columns; half += WIDTH) {
            const part shift = bias ? Unit::load(bias + column + half) : part{};
            for (int64_t i = 0; i < rows; i++) {
                T* target = x + (row + i) * width + column + half;
                const part sum = Unit::rounded(load_part(block + i * PANEL + half) + shift);
                Unit::put(target, Unit::load(target) + (factor == 1.0f ? sum : Unit::rounded(sum * factor)));
            }
        }
    }
};

// Columns come as WIDTH of the gate and WIDTH of the other factor: out [row, column / 2] = round(silu(gate)) * up.
// gelu: in the place of silu, in its tanh form; both are the gate over 1 + exp(-z).
template <typename Unit>
struct PutGated {
    Blocked<typename Unit::T> out;
    bool gelu;
    void operator()(const float* block, int64_t row, int64_t rows, int64_t column, int64_t) const {
        for (int64_t i = 0; i < rows; i++) {
            const part gate = Unit::rounded(load_part(block + i * PANEL));
            const part up = Unit::rounded(load_part(block + i * PANEL + WIDTH));
            const part z = gelu ? gate * (1.59576912f + 0.0713548163f * gate * gate) : gate;
            const part active = gate / (1.0f + exp_of(bounded(-z)));
            Unit::put(out.at(row + i, column / 2), Unit::rounded(active) * up);
        }
    }
};

// As `NormRule` in kitae/kernels/norms.py.
enum Rule : int64_t { EARLY = 0, LATE = 1, LATE_PLUS_ONE = 2 };

template <typename Unit>
inline part normed(part x, float inverse_rms, part weight, int64_t rule) {
    if (rule == EARLY) return weight * Unit::rounded(x * inverse_rms);
    return (rule == LATE ? weight : 1.0f + weight) * (x * inverse_rms);
}

template <typename Unit>
inline float squares(const typename Unit::T* x, int64_t n) {
    part sum = part{};
    for (int64_t i = 0; i < n; i += WIDTH) sum += Unit::load(x + i) * Unit::load(x + i);
    return sum_of(sum);
}

// The norm of rows, as a left operand; without a weight, the rows as they are.
template <typename Unit>
void norm_rows(const typename Unit::T* x, const typename Unit::T* weight, float eps, int64_t rule, int64_t M,
               const Blocked<typename Unit::T>& out) {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
        const auto* row = x + m * out.K;
        const float r = weight ? 1.0f / std::sqrt(squares<Unit>(row, out.K) / out.K + eps) : 1.0f;
        for (int64_t i = 0; i < out.K; i += WIDTH) {
            const part v = Unit::load(row + i);
            Unit::put(out.at(m, i), weight ? normed<Unit>(v, r, Unit::load(weight + i), rule) : v);
        }
    }
}

// x = round(x + round(norm(added) * factor))
template <typename Unit>
void add_normed_rows(typename Unit::T* x, const typename Unit::T* added, const typename Unit::T* weight, float eps,
                     int64_t rule, float factor, int64_t M, int64_t H) {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
        const auto* row = added + m * H;
        const float r = 1.0f / std::sqrt(squares<Unit>(row, H) / H + eps);
        for (int64_t i = 0; i < H; i += WIDTH) {
            part v = Unit::rounded(normed<Unit>(Unit::load(row + i), r, Unit::load(weight + i), rule));
            if (factor != 1.0f) v = Unit::rounded(v * factor);
            Unit::put(x + m * H + i, Unit::load(x + m * H + i) + v);
        }
    }
}

}  // namespace

// How a layer mixes experts; number: among the layers that do. The packed router has a column for each. With biases,
// [experts, 2, inner] and [experts, hidden], the experts are those of gpt-oss, which alone have a limit.
template <typename T>
struct ExpertMix {
    const T *router, *router_bias, *gate_up_bias, *down_bias;
    int64_t number, experts, top_k, renormalise;
    double alpha, limit;
};

// One layer of a decoder, as Python describes it. All matrices are packed; gate and up alternate. A norm, a bias or sinks
// that a model has not are null. wide_norms: those of queries and keys are over all heads at once. mixture: null in a
// dense layer; else gate_up and down have those of all experts, so many numbers apart.
template <typename T>
struct Layer {
    const T *before_attention, *qkv, *bias, *query_norm, *key_norm, *cos, *sin, *out, *out_bias, *after_attention;
    const T *before_mlp, *gate_up, *down, *after_mlp;
    T *keys, *values;
    const float* sinks;
    const ExpertMix<T>* mixture;
    int64_t window, rule, head_rule, wide_norms, pairs, gelu, inner, gate_up_step, down_step;
    double scale, softcap, eps_before_attention, eps_after_attention, eps_before_mlp, eps_after_mlp, eps_heads;
};

// The rows of an expert: how many, and where they begin among those of all.
struct Group {
    int64_t count, first;
};

// factor: of what each half of a layer adds.
template <typename T>
struct Decoder {
    int64_t hidden, heads, kv_heads, dim, page_size;
    double factor;
    // Room for as many rows as there are: x and added [T, hidden], qkv [T, (heads + 2 kv_heads) dim], and left operands.
    T *x, *added, *qkv, *normed, *mixed, *gated;
    // For mixtures: left operands of all experts, [T, experts] of a router, gates [T, top_k], experts [mixtures, T, top_k],
    // the pair of each gathered row, and the rows of each expert.
    T *gathered, *logits;
    float* gates;
    int32_t *chosen, *pair_of;
    Group* groups;
};

namespace {

// The norms of `count` heads that lie side by side, in place.
template <typename Unit>
void norm_heads(typename Unit::T* heads, int64_t count, int64_t dim, const typename Unit::T* weight, float eps,
                int64_t rule, bool wide) {
    const int64_t n = wide ? count * dim : dim;
    for (int64_t first = 0; first < count * dim; first += n) {
        const float r = 1.0f / std::sqrt(squares<Unit>(heads + first, n) / n + eps);
        for (int64_t i = 0; i < n; i += WIDTH) {
            auto* target = heads + first + i;
            Unit::put(target, normed<Unit>(Unit::load(target), r, Unit::load(weight + i), rule));
        }
    }
}

// Rotary of neighbours 2 i and 2 i + 1 instead of the halves of a head.
template <typename T>
void rotate_pairs(T* head, const T* cos, const T* sin, int64_t dim) {
    for (int64_t i = 0; i < dim / 2; i++) {
        const float a = load(head + 2 * i), b = load(head + 2 * i + 1), c = load(cos + i), s = load(sin + i);
        T p[4];
        store(p, a * c);
        store(p + 1, b * s);
        store(p + 2, b * c);
        store(p + 3, a * s);
        store(head + 2 * i, load(p) - load(p + 1));
        store(head + 2 * i + 1, load(p + 2) + load(p + 3));
    }
}

// Norms and rotary of one row's queries and keys, rounding where the modules round, and the write into the cache.
template <typename Unit, typename T = typename Unit::T>
void rotate_and_store(const Decoder<T>& d, const Layer<T>& l, T* row, int64_t position, int64_t slot) {
    const int64_t page = slot / d.page_size, place = slot % d.page_size;
    T *keys = row + d.heads * d.dim, *values = keys + d.kv_heads * d.dim;
    if (l.query_norm) {
        norm_heads<Unit>(row, d.heads, d.dim, l.query_norm, (float)l.eps_heads, l.head_rule, l.wide_norms);
        norm_heads<Unit>(keys, d.kv_heads, d.dim, l.key_norm, (float)l.eps_heads, l.head_rule, l.wide_norms);
    }
    const T *cos = l.cos + position * d.dim, *sin = l.sin + position * d.dim;
    for (T* head = row; head < values; head += d.dim)
        if (l.pairs)
            rotate_pairs(head, cos, sin, d.dim);
        else
            rotate_head(head, cos, sin, d.dim, false);
    for (int64_t g = 0; g < d.kv_heads; g++) {
        const int64_t home = ((page * d.kv_heads + g) * d.page_size + place) * d.dim;
        memcpy(l.keys + home, keys + g * d.dim, d.dim * sizeof(T));
        memcpy(l.values + home, values + g * d.dim, d.dim * sizeof(T));
    }
}

// Queries, keys and values of T rows, rotated; keys and values are in their slots afterwards.
template <typename Unit, typename T = typename Unit::T>
void project(const Decoder<T>& d, const Layer<T>& l, const int64_t* positions, const int64_t* slots, int64_t rows) {
    const int64_t width = (d.heads + 2 * d.kv_heads) * d.dim;
    const Blocked<T> normed{d.normed, d.hidden, Unit::height(rows)};
    norm_rows<Unit>(d.x, l.before_attention, (float)l.eps_before_attention, l.rule, rows, normed);
    product<Unit>(normed, l.qkv, rows, width, PutRows<Unit>{d.qkv, width, l.bias});
#pragma omp for schedule(static)
    for (int64_t t = 0; t < rows; t++) rotate_and_store<Unit>(d, l, d.qkv + t * width, positions[t], slots[t]);
}

// x += what a product gives, or its norm.
template <typename Unit, typename T = typename Unit::T>
void add_product(const Decoder<T>& d, const Blocked<T>& left, const T* right, const T* bias, const T* norm, float eps,
                 int64_t rule, int64_t rows) {
    if (norm) {
        product<Unit>(left, right, rows, d.hidden, PutRows<Unit>{d.added, d.hidden, bias});
        add_normed_rows<Unit>(d.x, d.added, norm, eps, rule, (float)d.factor, rows, d.hidden);
    } else {
        product<Unit>(left, right, rows, d.hidden, AddRows<Unit>{d.x, d.hidden, bias, (float)d.factor});
    }
}

}  // namespace

#include "experts.h"

namespace {

template <typename Unit, typename T = typename Unit::T>
void finish_layer(const Decoder<T>& d, const Layer<T>& l, int64_t rows) {
    const int64_t height = Unit::height(rows);
    const Blocked<T> mixed{d.mixed, d.heads * d.dim, height}, normed{d.normed, d.hidden, height};
    const Blocked<T> gated{d.gated, l.inner, height};
    add_product<Unit>(d, mixed, l.out, l.out_bias, l.after_attention, (float)l.eps_after_attention, l.rule, rows);
    norm_rows<Unit>(d.x, l.before_mlp, (float)l.eps_before_mlp, l.rule, rows, normed);
    if (l.mixture) return add_experts<Unit>(d, l, *l.mixture, normed, rows);
    product<Unit>(normed, l.gate_up, rows, 2 * l.inner, PutGated<Unit>{gated, l.gelu != 0});
    add_product<Unit>(d, gated, l.down, (const T*)nullptr, l.after_mlp, (float)l.eps_after_mlp, l.rule, rows);
}

#if defined(__AVX512F__)

// The sums over the lanes of sixteen vectors, in order.
inline vec sums_of(const __m512* v) {
    __m512 quads[4];
    for (int i = 0; i < 4; i++) {
        const __m512 *a = v + 4 * i, ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
        const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
        const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
        quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    __m512 halves[2];
    for (int i = 0; i < 2; i++)
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x44),
                                  _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xee));
    return (vec)_mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                              _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

template <typename T>
inline void fetch(const T* p, int64_t numbers) {
    for (int64_t i = 0; i < numbers; i += Blocked<T>::LINE) _mm_prefetch(p + i, _MM_HINT_T0);
}

inline __mmask16 first_lanes(int64_t n) { return n >= 16 ? (__mmask16)0xffff : n <= 0 ? (__mmask16)0 : (__mmask16)((1u << n) - 1); }

// `attend` with sixteen keys at a time. scores: R rows of n rounded up to 16.
template <typename Unit, int DIM, int R, typename T = typename Unit::T>
void attend_sixteen(const T* const* q, T* const* out, const Pages<T>& keys, const Pages<T>& values, int64_t first,
                    int64_t n, float* scores, float scale, float softcap, const float* sinks) {
    constexpr int LINE = Blocked<T>::LINE, P = DIM / LINE, C = DIM / 16;
    const int64_t width = tiles(n, 16) * 16 + 16;
    typename Unit::Line query[R][P];
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) query[r][p] = Unit::line(q[r] + LINE * p);
    Walk<T> key_at(keys, first), soon_at(keys, first + 16);
    for (int64_t begin = first; begin < n; begin += 16) {
        __m512 dots[R][16];
        for (int64_t j = 0; j < 16; j++, ++soon_at) {
            const T* key = *key_at;
            if (begin + j + 1 < n) ++key_at;  // behind the end, the last key again
            if (begin + j + 16 < n) fetch(*soon_at, DIM);
            for (int r = 0; r < R; r++) dots[r][j] = _mm512_setzero_ps();
            for (int p = 0; p < P; p++) {
                const auto k = Unit::line(key + LINE * p);
                for (int r = 0; r < R; r++) dots[r][j] = Unit::add_dot(dots[r][j], query[r][p], k);
            }
        }
        for (int r = 0; r < R; r++) {
            const vec score = sums_of(dots[r]) * scale;
            memcpy(scores + r * width + begin - first, &score, sizeof score);
        }
    }
    const int64_t span = n - first;
    for (int r = 0; r < R; r++) {
        float* row = scores + r * width;
        if (softcap > 0)
            for (int64_t t = 0; t < span; t++) row[t] = softcap * std::tanh(row[t] / softcap);
        for (int64_t t = span; t < tiles(span, 16) * 16; t++) row[t] = -INFINITY;
        __m512 largest = _mm512_set1_ps(sinks ? sinks[r] : -INFINITY);
        for (int64_t t = 0; t < span; t += 16) largest = _mm512_max_ps(largest, (__m512)load16(row + t));
        const float top = _mm512_reduce_max_ps(largest);
        vec total = vec{};
        for (int64_t t = 0; t < span; t += 16) {
            // Of the two, the instruction gives the second if one is no number: that must not become a probability.
            const vec e = exp_of((vec)_mm512_max_ps(_mm512_set1_ps(-87.0f), (__m512)(load16(row + t) - top)));
            const vec kept = (vec)_mm512_maskz_mov_ps(first_lanes(span - t), (__m512)e);
            memcpy(row + t, &kept, sizeof kept);
            total += kept;
        }
        const float inverse = 1.0f / (sum16(total) + (sinks ? std::exp(sinks[r] - top) : 0.0f));
        for (int64_t t = 0; t < span; t += 16) {
            const vec p = load16(row + t) * inverse;
            memcpy(row + t, &p, sizeof p);
        }
    }
    vec mixed[R][C] = {};
    Walk<T> value_at(values, first), later_at(values, first + 8);
    for (int64_t t = first; t < n; t++, ++value_at, ++later_at) {
        const T* value = *value_at;
        if (t + 8 < n) fetch(*later_at, DIM);
        for (int c = 0; c < C; c++) {
            const vec v = load16(value + 16 * c);
            for (int r = 0; r < R; r++) mixed[r][c] += scores[r * width + t - first] * v;
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) Unit::put(out[r] + 16 * c, mixed[r][c]);
}

#endif

template <typename Unit, int DIM, int R>
constexpr auto attend_with() {
    typedef typename Unit::T T;
#if defined(__AVX512F__)
    if constexpr (DIM % Blocked<T>::LINE == 0)
        return attend_sixteen<Unit, DIM, R>;
    else
#endif
        return attend<T, DIM, R>;
}

// Row t attends to its sequence, whose pages are row `sequence[t]` of the table, up to its own position.
template <typename Unit, int DIM, typename T = typename Unit::T>
void attend_rows(const Decoder<T>& d, const Layer<T>& l, const int64_t* positions, const int64_t* sequence,
                 const int32_t* table, int64_t width, int64_t rows, std::vector<float>& scores) {
    const int64_t repeat = d.heads / d.kv_heads, row_width = (d.heads + 2 * d.kv_heads) * DIM;
    const int64_t stride = d.kv_heads * d.page_size * DIM;
    const Blocked<T> out{d.mixed, d.heads * DIM, Unit::height(rows)};
#pragma omp for collapse(2) schedule(dynamic, 6)
    for (int64_t t = 0; t < rows; t++)
        for (int64_t g = 0; g < d.kv_heads; g++) {
            const int32_t* pages = table + sequence[t] * width;
            const int64_t n = positions[t] + 1, offset = g * d.page_size * DIM;
            const int64_t first = l.window > 0 && n > l.window ? n - l.window : 0;
            const T* row = d.qkv + t * row_width;
            const Pages<T> keys{l.keys, pages, d.page_size, stride, offset, DIM};
            const Pages<T> values{l.values, pages, d.page_size, stride, offset, DIM};
            if ((int64_t)scores.size() < 4 * (n + 32)) scores.resize(8 * (n + 32));
            alignas(64) T mixed[4 * DIM];
            for (int64_t h = g * repeat; h < (g + 1) * repeat; h += 4) {
                const int64_t count = std::min<int64_t>(4, (g + 1) * repeat - h);
                const T* queries[4];
                T* targets[4];
                for (int64_t r = 0; r < count; r++) {
                    queries[r] = row + (h + r) * DIM;
                    targets[r] = mixed + r * DIM;
                }
                const auto run = count == 4   ? attend_with<Unit, DIM, 4>()
                                 : count == 3 ? attend_with<Unit, DIM, 3>()
                                 : count == 2 ? attend_with<Unit, DIM, 2>()
                                              : attend_with<Unit, DIM, 1>();
                run(queries, targets, keys, values, first, n, scores.data(), (float)l.scale, (float)l.softcap,
                    l.sinks ? l.sinks + h : nullptr);
                for (int64_t i = 0; i < count * DIM; i += 16)
                    memcpy(out.at(t, h * DIM + i), mixed + i, 16 * sizeof(T));
            }
        }
}

// All layers: see the door.
template <typename Unit, typename T = typename Unit::T>
void forward(const Decoder<T>& d, const Layer<T>* layers, int64_t count, const int64_t* positions, const int64_t* slots,
             const int64_t* sequence, const int32_t* table, int64_t width, int64_t rows) {
    std::vector<float> scores;
    const auto attend_all = d.dim == 16    ? attend_rows<Unit, 16>
                            : d.dim == 32  ? attend_rows<Unit, 32>
                            : d.dim == 64  ? attend_rows<Unit, 64>
                            : d.dim == 80  ? attend_rows<Unit, 80>
                            : d.dim == 96  ? attend_rows<Unit, 96>
                            : d.dim == 128 ? attend_rows<Unit, 128>
                                           : attend_rows<Unit, 256>;
    for (int64_t i = 0; i < count; i++) {
        project<Unit>(d, layers[i], positions, slots, rows);
        attend_all(d, layers[i], positions, sequence, table, width, rows, scores);
        finish_layer<Unit>(d, layers[i], rows);
    }
}

}  // namespace

// linear: out [M, N] = x [M, K] times a packed matrix, plus a bias; `room` holds x blocked.
// norm: rows [M, H] to rows.
// project, finish_layer: the halves of a layer for rows of x; between them, attention gives `mixed` [rows, heads * dim].
// forward: all layers. Row t is at positions[t] of the sequence whose pages are row sequence[t] of the table, and its key
// and value go to slots[t]. x goes in as embeddings and comes out before the last norm.
#define EXPORT_DECODER(SUFFIX, UNIT)                                                                                   \
    void pack_##SUFFIX(const UNIT::T* weight, int64_t N, int64_t K, UNIT::T* packed, int64_t first, int64_t step) {    \
        _Pragma("omp parallel") UNIT::pack(weight, N, K, packed, first, step);                                         \
    }                                                                                                                  \
    void linear_##SUFFIX(const UNIT::T* x, const UNIT::T* packed, const UNIT::T* bias, UNIT::T* out, int64_t M,        \
                         int64_t N, int64_t K, UNIT::T* room) {                                                        \
        _Pragma("omp parallel") {                                                                                      \
            UNIT::Registers registers(M);                                                                              \
            const Blocked<UNIT::T> left{room, K, UNIT::height(M)};                                                     \
            norm_rows<UNIT>(x, nullptr, 0.0f, EARLY, M, left);                                                         \
            product<UNIT>(left, packed, M, N, PutRows<UNIT>{out, N, bias});                                            \
        }                                                                                                              \
    }                                                                                                                  \
    void norm_##SUFFIX(const UNIT::T* x, const UNIT::T* weight, double eps, int64_t rule, UNIT::T* out, int64_t M,     \
                       int64_t H) {                                                                                    \
        _Pragma("omp parallel") norm_rows<UNIT>(x, weight, (float)eps, rule, M, Blocked<UNIT::T>{out, H, 1});          \
    }                                                                                                                  \
    void project_##SUFFIX(const Decoder<UNIT::T>* d, const Layer<UNIT::T>* l, const int64_t* positions,                \
                          const int64_t* slots, int64_t rows) {                                                        \
        _Pragma("omp parallel") {                                                                                      \
            UNIT::Registers registers(rows);                                                                           \
            project<UNIT>(*d, *l, positions, slots, rows);                                                             \
        }                                                                                                              \
    }                                                                                                                  \
    void finish_layer_##SUFFIX(const Decoder<UNIT::T>* d, const Layer<UNIT::T>* l, const UNIT::T* mixed,               \
                               int64_t rows) {                                                                         \
        _Pragma("omp parallel") {                                                                                      \
            UNIT::Registers registers(rows);                                                                           \
            const Blocked<UNIT::T> left{d->mixed, d->heads * d->dim, UNIT::height(rows)};                              \
            norm_rows<UNIT>(mixed, nullptr, 0.0f, EARLY, rows, left);                                                  \
            finish_layer<UNIT>(*d, *l, rows);                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    void forward_##SUFFIX(const Decoder<UNIT::T>* d, const Layer<UNIT::T>* layers, int64_t count,                      \
                          const int64_t* positions, const int64_t* slots, const int64_t* sequence,                     \
                          const int32_t* table, int64_t width, int64_t rows) {                                         \
        _Pragma("omp parallel") {                                                                                      \
            UNIT::Registers registers(rows);                                                                           \
            forward<UNIT>(*d, layers, count, positions, slots, sequence, table, width, rows);                          \
        }                                                                                                              \
    }

extern "C" {

// What Python compares its own descriptions with, and the columns of a panel.
int64_t mixture_size() { return sizeof(ExpertMix<float>); }
int64_t layer_size() { return sizeof(Layer<float>); }
int64_t decoder_size() { return sizeof(Decoder<float>); }
int64_t panel_width() { return PANEL; }

EXPORT_DECODER(f32, Panels)
}

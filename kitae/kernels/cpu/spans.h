// Attention of packed training rows, and its gradient: a span sees its prefix and, causally, itself.
//
// A thread has one span and one key-value head at a time. Keys and values are gathered once, into memory that stays in
// the cache; the query heads that share them are rows of the same small products. Scores exist for one block of
// positions only, in float32. What a span gives to its prefix is added span by span at the end, so that bits do not
// depend on which thread was first. What differs between the kinds of numbers is in a "unit", which holds the operands
// of a thread and makes the products: `Floats` here, for float32 on any processor, and `OnTiles` in amx.h, for bfloat16.
// The rest of cpu.cpp is known here: `vec`, `load16`, `store16`, `exp_negative`.

namespace spans {

#ifdef __AVX512F__
constexpr int ROWS = 6, LANES = 4;  // sums that fit into the registers, with the operands
#else
constexpr int ROWS = 2, LANES = 2;
#endif

struct Matrix {  // element (i, j) is at i * row + j * step
    const float* at;
    int64_t row, step;
};

// c [M, 16 N] = or += a [M, K] b [K, 16 N]
template <int M, int N>
void tile(Matrix a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t K, bool add) {
    vec sum[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = add ? load16(c + m * c_row + 16 * n) : vec{};
    for (int64_t k = 0; k < K; k++) {
        vec row[N];
        for (int n = 0; n < N; n++) row[n] = load16(b + k * b_row + 16 * n);
        for (int m = 0; m < M; m++) {
            const float x = a.at[m * a.row + k * a.step];
            for (int n = 0; n < N; n++) sum[m][n] += x * row[n];
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store16(c + m * c_row + 16 * n, sum[m][n]);
}

template <int M, int N>
void last_rows(int64_t left, Matrix a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t K, bool add) {
    if (left == M)
        tile<M, N>(a, b, b_row, c, c_row, K, add);
    else if constexpr (M > 1)
        last_rows<M - 1, N>(left, a, b, b_row, c, c_row, K, add);
}

template <int N>
void columns(int64_t M, Matrix a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t K, bool add) {
    int64_t m = 0;
    for (; m + ROWS <= M; m += ROWS)
        tile<ROWS, N>({a.at + m * a.row, a.row, a.step}, b, b_row, c + m * c_row, c_row, K, add);
    last_rows<ROWS - 1, N>(M - m, {a.at + m * a.row, a.row, a.step}, b, b_row, c + m * c_row, c_row, K, add);
}

template <int N>
void last_columns(int64_t left, int64_t M, Matrix a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t K,
                  bool add) {
    if (left == N)
        columns<N>(M, a, b, b_row, c, c_row, K, add);
    else if constexpr (N > 1)
        last_columns<N - 1>(left, M, a, b, b_row, c, c_row, K, add);
}

// width: a multiple of 16
void product(int64_t M, int64_t width, int64_t K, Matrix a, const float* b, int64_t b_row, float* c, int64_t c_row,
             bool add = false) {
    int64_t n = 0;
    for (; n + 16 * LANES <= width; n += 16 * LANES) columns<LANES>(M, a, b + n, b_row, c + n, c_row, K, add);
    last_columns<LANES - 1>((width - n) / 16, M, a, b + n, b_row, c + n, c_row, K, add);
}

struct Span {
    int64_t start, length, prefix_start, prefix;
    int64_t keys() const { return prefix + length; }
    int64_t place(int64_t key) const { return key < prefix ? prefix_start + key : start + key - prefix; }
};

template <typename T>
struct Rows {  // [T, heads, dim], the last dimension contiguous
    T* at;
    int64_t row, head;
    T* of(int64_t t, int64_t h) const { return at + t * row + h * head; }
};

struct Shape {
    int64_t heads, kv_heads, dim, window;
    float scale;
    int64_t repeat() const { return heads / kv_heads; }
};

inline int64_t padded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

typedef int32_t lanes __attribute__((vector_size(64)));

// The same as that of one number. What is above 0, by rounding, is 0; what is no number stays so.
inline vec exp_negative(vec x) {
    const vec least = vec{} - 87.0f;
    x = x > vec{} ? vec{} : x;
    x = x < least ? least : x;
    const lanes whole = __builtin_convertvector(x * 1.44269504f - 0.5f, lanes);
    const vec n = __builtin_convertvector(whole, vec);
    const vec r = x - n * 0.693145752f - n * 1.42860677e-6f;
    const vec p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666672f + r * (0.0416666418f + r * (0.00833345205f + r * 0.00138889f)))));
    return p * (vec)((whole + 127) << 23);
}

// Scores of one row, sixteen at a time: those of keys from `begin` to `end` count, others are `x` when they are read, and
// zeros when they are written.
struct Sight {
    int64_t begin, end;
    bool whole(int64_t s) const { return s >= begin && s + 16 <= end; }
    lanes counts(int64_t s) const {
        constexpr lanes place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return (place >= (int32_t)(begin - s)) & (place < (int32_t)(end - s));
    }
    vec read(const float* row, int64_t s, float x) const {
        const vec found = load16(row + s);
        return whole(s) ? found : counts(s) ? found : vec{} + x;
    }
    vec kept(vec x, int64_t s) const { return whole(s) ? x : counts(s) ? x : vec{}; }
    int64_t first() const { return begin / 16 * 16; }
    // What is left of columns [from, to) is zeros.
    void clear(float* row, int64_t from, int64_t to) const {
        for (int64_t s = from; s < first(); s += 16) store16(row + s, vec{});
        for (int64_t s = padded(end, 16); s < to; s += 16) store16(row + s, vec{});
    }
};

inline float largest(const float* row, const Sight& seen) {
    vec tops = seen.read(row, seen.first(), -INFINITY);
    for (int64_t s = seen.first() + 16; s < seen.end; s += 16) {
        const vec more = seen.read(row, s, -INFINITY);
        tops = more > tops ? more : tops;
    }
    float top = tops[0];
    for (int j = 1; j < 16; j++) top = std::max(top, tops[j]);
    return top;
}

// `count` positions of a span from `first` on: their rows, one for each query head of the group, and the keys that any of
// them sees, from `begin`. Scores have `width` columns: as many keys, and the rest of a step.
struct Block {
    int64_t first, count, rows, begin, end, width;
    Block(const Span& span, const Shape& shape, int64_t i, int64_t positions, int64_t step) : first(i) {
        count = std::min(positions, span.length - i);
        rows = count * shape.repeat();
        end = span.prefix + first + count;
        begin = shape.window > 0 ? std::max<int64_t>(0, span.prefix + first + 1 - shape.window) / step * step : 0;
        width = padded(end - begin, step);
    }
    // The keys that a row sees.
    Sight seen(const Span& span, const Shape& shape, int64_t row) const {
        const int64_t stop = span.prefix + first + row / shape.repeat() + 1;
        return {shape.window > 0 && stop > shape.window ? stop - shape.window : 0, stop};
    }
    int64_t position(const Span& span, const Shape& shape, int64_t row) const {
        return span.start + first + row / shape.repeat();
    }
    int64_t head(const Shape& shape, int64_t g, int64_t row) const { return g * shape.repeat() + row % shape.repeat(); }
};

template <typename T>
void take_keys(const Rows<T>& x, const Span& span, int64_t head, int64_t dim, T* out) {
    for (int64_t s = 0; s < span.keys(); s++) memcpy(out + s * dim, x.of(span.place(s), head), dim * sizeof(T));
}

template <typename T>
void take(const Rows<T>& x, const Span& span, const Shape& shape, const Block& block, int64_t g, T* out) {
    for (int64_t r = 0; r < block.rows; r++)
        memcpy(out + r * shape.dim, x.of(block.position(span, shape, r), block.head(shape, g, r)), shape.dim * sizeof(T));
}

// Keys and values of a span, queries and gradients of a block, and what they make. `learns`: with gradients.
class Floats {
  public:
    typedef float T;
    static constexpr int64_t ROWS = 48, STEP = 16;  // of scores at a time; keys come in steps
    std::vector<float> queries, grads;              // [rows, dim]

    Floats(const Shape& shape, int64_t most, int64_t longest, bool learns)
        : queries(most * shape.dim), grads(learns ? most * shape.dim : 0), dim(shape.dim), keys(longest * dim),
          keys_t(longest * dim), values(longest * dim), values_t(learns ? longest * dim : 0) {
        for (auto& sum : sums) sum.resize(learns ? longest * dim : 0);
    }

    void begin(const Rows<float>& k, const Rows<float>& v, const Span& span, int64_t g) {
        wide = padded(span.keys(), STEP);
        take_keys(k, span, g, dim, keys.data());
        take_keys(v, span, g, dim, values.data());
        turn(keys, span.keys(), keys_t);
        if (!values_t.empty()) turn(values, span.keys(), values_t);
        for (auto& sum : sums) std::fill(sum.begin(), sum.begin() + (sum.empty() ? 0 : span.keys() * dim), 0.0f);
    }
    void ready(const Block&) {}
    // scores [rows, width] = queries keys', those of gradients = gradients values'
    void score(const Block& b, float* scores) { against(b, queries, keys_t, scores); }
    void score_gradients(const Block& b, float* scores) { against(b, grads, values_t, scores); }
    // out [rows, dim] = scores values, or the gradient of queries = scores keys
    void mix(const Block& b, float* scores, float* out) { weigh(b, scores, values, out); }
    void pull(const Block& b, float* scores, float* out) { weigh(b, scores, keys, out); }
    // What the block gives to its keys and values, from `scores` to the gradients of scores and from probabilities.
    void collect(const Block& b, float* probs, float* dscores) {
        product(b.end - b.begin, dim, b.rows, {dscores, 1, b.width}, queries.data(), dim, sums[0].data() + b.begin * dim,
                dim, true);
        product(b.end - b.begin, dim, b.rows, {probs, 1, b.width}, grads.data(), dim, sums[1].data() + b.begin * dim, dim,
                true);
    }
    const float* collected(int64_t, int which) { return sums[which].data(); }  // [keys, dim]

  private:
    int64_t dim, wide = 0;
    std::vector<float> keys, keys_t, values, values_t, sums[2];

    void turn(const std::vector<float>& from, int64_t n, std::vector<float>& to) {
        for (int64_t s = 0; s < wide; s += 16) {  // lines of the cache are written whole
            const int64_t last = std::min<int64_t>(16, n - s);
            for (int64_t d = 0; d < dim; d++) {
                vec line{};
                for (int64_t j = 0; j < last; j++) line[j] = from[(s + j) * dim + d];
                store16(to.data() + d * wide + s, line);
            }
        }
    }
    void against(const Block& b, const std::vector<float>& rows, const std::vector<float>& turned, float* scores) {
        product(b.rows, b.width, dim, {rows.data(), dim, 1}, turned.data() + b.begin, wide, scores, b.width);
    }
    void weigh(const Block& b, const float* scores, const std::vector<float>& rows, float* out) {
        product(b.rows, dim, b.end - b.begin, {scores, b.width, 1}, rows.data() + b.begin * dim, dim, out, dim);
    }
};

// Positions of a block, and rows that it has at most, with those that fill up a step.
template <typename Unit>
struct Height {
    int64_t positions, rows;
    explicit Height(const Shape& shape)
        : positions(std::max<int64_t>(1, Unit::ROWS / shape.repeat())), rows(padded(positions * shape.repeat(), Unit::STEP)) {}
};

template <typename Unit>
int64_t longest_of(const Span* all, int64_t count) {
    int64_t longest = 0;
    for (int64_t i = 0; i < count; i++) longest = std::max(longest, all[i].keys());
    return padded(longest, Unit::STEP);
}

template <typename Unit, typename T = typename Unit::T>
void forward(Rows<T> q, Rows<T> k, Rows<T> v, Rows<T> out, float* lse, const Span* all, int64_t count, const Shape& shape) {
    const Height<Unit> most(shape);
    const int64_t dim = shape.dim, longest = longest_of<Unit>(all, count);
#pragma omp parallel
    {
        Unit unit(shape, most.rows, longest, false);
        std::vector<float> scores(most.rows * longest), mixed(most.rows * dim), inverse(most.rows);
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++)
            for (int64_t g = 0; g < shape.kv_heads; g++) {
                const Span& span = all[i];
                unit.begin(k, v, span, g);
                for (int64_t p = 0; p < span.length; p += most.positions) {
                    const Block block(span, shape, p, most.positions, Unit::STEP);
                    take(q, span, shape, block, g, unit.queries.data());
                    unit.ready(block);
                    unit.score(block, scores.data());
                    for (int64_t r = 0; r < block.rows; r++) {
                        const Sight seen = block.seen(span, shape, r);
                        float* x = scores.data() + r * block.width - block.begin;
                        const float top = largest(x, seen) * shape.scale;
                        vec sums{};
                        for (int64_t s = seen.first(); s < seen.end; s += 16) {
                            const vec e = seen.kept(exp_negative(load16(x + s) * shape.scale - top), s);
                            store16(x + s, e);
                            sums += e;
                        }
                        seen.clear(x, block.begin, block.begin + block.width);
                        const float total = sum16(sums);
                        inverse[r] = 1.0f / total;
                        lse[block.position(span, shape, r) * shape.heads + block.head(shape, g, r)] = top + std::log(total);
                    }
                    unit.mix(block, scores.data(), mixed.data());
                    for (int64_t r = 0; r < block.rows; r++) {
                        T* to = out.of(block.position(span, shape, r), block.head(shape, g, r));
                        for (int64_t d = 0; d < dim; d += 16) store16(to + d, load16(mixed.data() + r * dim + d) * inverse[r]);
                    }
                }
            }
    }
}

// Gradients of keys or values of the whole row in float32, and where they go when all is added.
template <typename T>
struct Gathered {
    std::vector<float> room;
    Rows<float> rows;
    Gathered(const Rows<T>& to, int64_t tokens, const Shape& shape) {
        if constexpr (sizeof(T) == sizeof(float)) {
            rows = to;
        } else {
            room.resize(tokens * shape.kv_heads * shape.dim);
            rows = {room.data(), shape.kv_heads * shape.dim, shape.dim};
        }
    }
    // Within a parallel region.
    void finish(const Rows<T>& to, int64_t tokens, const Shape& shape) const {
        if (room.empty()) return;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t g = 0; g < shape.kv_heads; g++)
                for (int64_t d = 0; d < shape.dim; d += 16) store16(to.of(t, g) + d, load16(rows.of(t, g) + d));
    }
};

template <typename Unit, typename T = typename Unit::T>
void backward(Rows<T> q, Rows<T> k, Rows<T> v, Rows<T> out, Rows<T> grad, const float* lse, Rows<T> dq, Rows<T> dk,
              Rows<T> dv, const Span* all, int64_t count, const Shape& shape) {
    const Height<Unit> most(shape);
    const int64_t dim = shape.dim, longest = longest_of<Unit>(all, count), tokens = all[count - 1].start + all[count - 1].length;
    int64_t shared = 0;
    std::vector<int64_t> begins;  // of each span's part of what prefixes get
    for (int64_t i = 0; i < count; i++) {
        begins.push_back(shared);
        shared += all[i].prefix * shape.kv_heads * dim;
    }
    std::vector<float> given[2] = {std::vector<float>(shared), std::vector<float>(shared)};
    const Gathered<T> targets[2] = {{dk, tokens, shape}, {dv, tokens, shape}};
#pragma omp parallel
    {
        Unit unit(shape, most.rows, longest, true);
        std::vector<float> scores(most.rows * longest), dscores(most.rows * longest), dqueries(most.rows * dim);
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++)
            for (int64_t g = 0; g < shape.kv_heads; g++) {
                const Span& span = all[i];
                unit.begin(k, v, span, g);
                for (int64_t p = 0; p < span.length; p += most.positions) {
                    const Block block(span, shape, p, most.positions, Unit::STEP);
                    take(q, span, shape, block, g, unit.queries.data());
                    take(grad, span, shape, block, g, unit.grads.data());
                    unit.ready(block);
                    unit.score(block, scores.data());
                    unit.score_gradients(block, dscores.data());
                    for (int64_t r = 0; r < block.rows; r++) {
                        const Sight seen = block.seen(span, shape, r);
                        const int64_t t = block.position(span, shape, r), h = block.head(shape, g, r);
                        const T *o = out.of(t, h), *go = unit.grads.data() + r * dim;
                        const float shift = lse[t * shape.heads + h];
                        vec products{};
                        for (int64_t d = 0; d < dim; d += 16) products += load16(o + d) * load16(go + d);
                        const float delta = sum16(products);
                        float *x = scores.data() + r * block.width - block.begin, *dx = dscores.data() + (x - scores.data());
                        for (int64_t s = seen.first(); s < seen.end; s += 16) {
                            const vec p = seen.kept(exp_negative(load16(x + s) * shape.scale - shift), s);
                            store16(x + s, p);
                            store16(dx + s, seen.kept(p * (load16(dx + s) - delta) * shape.scale, s));
                        }
                        for (float* row : {x, dx}) seen.clear(row, block.begin, block.begin + block.width);
                    }
                    unit.pull(block, dscores.data(), dqueries.data());
                    unit.collect(block, scores.data(), dscores.data());
                    for (int64_t r = 0; r < block.rows; r++) {
                        T* to = dq.of(block.position(span, shape, r), block.head(shape, g, r));
                        for (int64_t d = 0; d < dim; d += 16) store16(to + d, load16(dqueries.data() + r * dim + d));
                    }
                }
                for (int j = 0; j < 2; j++) {
                    const float* sums = unit.collected(span.keys(), j);
                    memcpy(given[j].data() + begins[i] + g * span.prefix * dim, sums, span.prefix * dim * sizeof(float));
                    for (int64_t s = 0; s < span.length; s++)
                        memcpy(targets[j].rows.of(span.start + s, g), sums + (span.prefix + s) * dim, dim * sizeof(float));
                }
            }
#pragma omp for collapse(2) schedule(static, 1)
        for (int j = 0; j < 2; j++)
            for (int64_t g = 0; g < shape.kv_heads; g++)
                for (int64_t i = 0; i < count; i++) {
                    const float* part = given[j].data() + begins[i] + g * all[i].prefix * dim;
                    for (int64_t s = 0; s < all[i].prefix; s++) {
                        float* to = targets[j].rows.of(all[i].prefix_start + s, g);
                        for (int64_t d = 0; d < dim; d++) to[d] += part[s * dim + d];
                    }
                }
        targets[0].finish(dk, tokens, shape);
        targets[1].finish(dv, tokens, shape);
    }
}

}  // namespace spans

// all [count, 4]: start, length, prefix_start, prefix of each span; strides: row and head of each of q, k, v, out, and,
// for the gradient, of grad, dq, dk, dv.
#define EXPORT_SPANS(SUFFIX, UNIT)                                                                                     \
    void attend_spans_##SUFFIX(UNIT::T* q, UNIT::T* k, UNIT::T* v, UNIT::T* out, float* lse, const int64_t* all,       \
                               const int64_t* strides, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim,    \
                               float scale, int64_t window) {                                                          \
        const int64_t* s = strides;                                                                                    \
        spans::forward<UNIT>({q, s[0], s[1]}, {k, s[2], s[3]}, {v, s[4], s[5]}, {out, s[6], s[7]}, lse,                \
                             (const spans::Span*)all, count, {heads, kv_heads, dim, window, scale});                   \
    }                                                                                                                  \
    void attend_spans_backward_##SUFFIX(UNIT::T* q, UNIT::T* k, UNIT::T* v, UNIT::T* out, UNIT::T* grad,               \
                                        const float* lse, UNIT::T* dq, UNIT::T* dk, UNIT::T* dv, const int64_t* all,   \
                                        const int64_t* strides, int64_t count, int64_t heads, int64_t kv_heads,        \
                                        int64_t dim, float scale, int64_t window) {                                    \
        const int64_t* s = strides;                                                                                    \
        spans::backward<UNIT>({q, s[0], s[1]}, {k, s[2], s[3]}, {v, s[4], s[5]}, {out, s[6], s[7]}, {grad, s[8], s[9]},\
                              lse, {dq, s[10], s[11]}, {dk, s[12], s[13]}, {dv, s[14], s[15]},                         \
                              (const spans::Span*)all, count, {heads, kv_heads, dim, window, scale});                  \
    }

extern "C" {
EXPORT_SPANS(f32, spans::Floats)
}

// Attention of packed training rows in fp32, and its gradient: a span sees its prefix and, causally, itself.
//
// A thread has one span and one key-value head at a time. Keys and values are gathered once, into memory that stays in
// the cache; the query heads that share them are rows of the same small products. Scores exist for one block of
// positions only. What a span gives to its prefix is written apart and added span by span at the end, so that bits do
// not depend on which thread was first. The rest of cpu.cpp is known here: `vec`, `load16`, `store16`, `exp_negative`.

namespace spans {

#ifdef __AVX512F__
constexpr int ROWS = 6, LANES = 4;  // sums that fit into the registers, with the operands
#else
constexpr int ROWS = 2, LANES = 2;
#endif
constexpr int64_t BLOCK = 48;  // rows of scores at a time

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

struct Rows {  // [T, heads, dim], the last dimension contiguous
    float* at;
    int64_t row, head;
    float* of(int64_t t, int64_t h) const { return at + t * row + h * head; }
};

struct Shape {
    int64_t heads, kv_heads, dim, window;
    float scale;
    int64_t repeat() const { return heads / kv_heads; }
    int64_t positions() const { return std::max<int64_t>(1, BLOCK / repeat()); }  // of a block
};

inline int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// [keys, dim] and its transpose [dim, padded(keys)]; either may be left out.
void gather(const Rows& x, const Span& span, int64_t head, int64_t dim, float* rows, float* transposed) {
    const int64_t n = span.keys(), wide = padded(n);
    for (int64_t s = 0; rows && s < n; s++) memcpy(rows + s * dim, x.of(span.place(s), head), dim * sizeof(float));
    for (int64_t s = 0; transposed && s < wide; s += 16) {  // lines of the cache are written whole
        const float* from[16];
        const int64_t last = std::min<int64_t>(16, n - s);
        for (int64_t j = 0; j < last; j++) from[j] = x.of(span.place(s + j), head);
        for (int64_t d = 0; d < dim; d++) {
            vec line{};
            for (int64_t j = 0; j < last; j++) line[j] = from[j][d];
            store16(transposed + d * wide + s, line);
        }
    }
}

// A plain loop was not vectorised.
inline float largest(const float* x, int64_t n) {
    float top = x[0];
    int64_t i = 0;
    if (n >= 16) {
        vec tops = load16(x);
        for (i = 16; i + 16 <= n; i += 16) {
            const vec more = load16(x + i);
            tops = more > tops ? more : tops;
        }
        for (int j = 0; j < 16; j++) top = std::max(top, tops[j]);
    }
    for (; i < n; i++) top = std::max(top, x[i]);
    return top;
}

// The positions [first, first + count) of a span: their rows, and the keys that any of them sees.
struct Block {
    int64_t first, count, rows, begin, end;
    Block(const Span& span, const Shape& shape, int64_t i) : first(i) {
        count = std::min(shape.positions(), span.length - i);
        rows = count * shape.repeat();
        end = span.prefix + first + count;
        begin = shape.window > 0 ? std::max<int64_t>(0, span.prefix + first + 1 - shape.window) / 16 * 16 : 0;
    }
    // The keys that a row sees.
    std::pair<int64_t, int64_t> seen(const Span& span, const Shape& shape, int64_t row) const {
        const int64_t stop = span.prefix + first + row / shape.repeat() + 1;
        return {shape.window > 0 && stop > shape.window ? stop - shape.window : 0, stop};
    }
};

void take(const Rows& x, const Span& span, const Shape& shape, const Block& block, int64_t g, float scale, float* out) {
    for (int64_t r = 0; r < block.rows; r++) {
        const float* from = x.of(span.start + block.first + r / shape.repeat(), g * shape.repeat() + r % shape.repeat());
        for (int64_t d = 0; d < shape.dim; d += 16) store16(out + r * shape.dim + d, load16(from + d) * scale);
    }
}

void forward(Rows q, Rows k, Rows v, Rows out, float* lse, const Span* all, int64_t count, const Shape& shape) {
    const int64_t dim = shape.dim, repeat = shape.repeat(), most = shape.positions() * repeat;
    int64_t longest = 0;
    for (int64_t i = 0; i < count; i++) longest = std::max(longest, padded(all[i].keys()));
#pragma omp parallel
    {
        std::vector<float> keys(dim * longest), values(dim * longest), scores(most * longest), queries(most * dim),
            mixed(most * dim);
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++)
            for (int64_t g = 0; g < shape.kv_heads; g++) {
                const Span& span = all[i];
                const int64_t wide = padded(span.keys());
                gather(k, span, g, dim, nullptr, keys.data());
                gather(v, span, g, dim, values.data(), nullptr);
                for (int64_t p = 0; p < span.length; p += shape.positions()) {
                    const Block block(span, shape, p);
                    const int64_t first = block.begin, width = padded(block.end) - first;
                    take(q, span, shape, block, g, shape.scale, queries.data());
                    product(block.rows, width, dim, {queries.data(), dim, 1}, keys.data() + first, wide, scores.data(),
                            width);
                    for (int64_t r = 0; r < block.rows; r++) {
                        const auto [begin, end] = block.seen(span, shape, r);
                        float* x = scores.data() + r * width - first;
                        const float top = largest(x + begin, end - begin);
                        float total = 0;
#pragma omp simd reduction(+ : total)
                        for (int64_t s = begin; s < end; s++) {
                            x[s] = exp_negative(x[s] - top);
                            total += x[s];
                        }
                        const float inverse = 1.0f / total;
                        for (int64_t s = first; s < begin; s++) x[s] = 0;
#pragma omp simd
                        for (int64_t s = begin; s < end; s++) x[s] *= inverse;
                        for (int64_t s = end; s < block.end; s++) x[s] = 0;
                        const int64_t t = span.start + block.first + r / repeat;
                        lse[t * shape.heads + g * repeat + r % repeat] = top + std::log(total);
                    }
                    product(block.rows, dim, block.end - first, {scores.data(), width, 1}, values.data() + first * dim,
                            dim, mixed.data(), dim);
                    for (int64_t r = 0; r < block.rows; r++)
                        memcpy(out.of(span.start + block.first + r / repeat, g * repeat + r % repeat),
                               mixed.data() + r * dim, dim * sizeof(float));
                }
            }
    }
}

void backward(Rows q, Rows k, Rows v, Rows out, Rows grad, const float* lse, Rows dq, Rows dk, Rows dv, const Span* all,
              int64_t count, const Shape& shape) {
    const int64_t dim = shape.dim, repeat = shape.repeat(), most = shape.positions() * repeat;
    int64_t longest = 0, shared = 0;
    std::vector<int64_t> begins;  // of each span's part of what prefixes get
    for (int64_t i = 0; i < count; i++) {
        longest = std::max(longest, padded(all[i].keys()));
        begins.push_back(shared);
        shared += all[i].prefix * shape.kv_heads * dim;
    }
    std::vector<float> given[2] = {std::vector<float>(shared), std::vector<float>(shared)};
    const Rows targets[2] = {dk, dv};
#pragma omp parallel
    {
        std::vector<float> keys(dim * longest), keys_t(dim * longest), values_t(dim * longest), scores(most * longest),
            dscores(most * longest), queries(most * dim), grads(most * dim), dqueries(most * dim);
        std::vector<float> sums[2] = {std::vector<float>(dim * longest), std::vector<float>(dim * longest)};
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++)
            for (int64_t g = 0; g < shape.kv_heads; g++) {
                const Span& span = all[i];
                const int64_t wide = padded(span.keys());
                gather(k, span, g, dim, keys.data(), keys_t.data());
                gather(v, span, g, dim, nullptr, values_t.data());
                for (auto& sum : sums) std::fill(sum.begin(), sum.begin() + span.keys() * dim, 0.0f);
                for (int64_t p = 0; p < span.length; p += shape.positions()) {
                    const Block block(span, shape, p);
                    const int64_t first = block.begin, width = padded(block.end) - first, seen = block.end - first;
                    take(q, span, shape, block, g, shape.scale, queries.data());
                    take(grad, span, shape, block, g, 1.0f, grads.data());
                    product(block.rows, width, dim, {queries.data(), dim, 1}, keys_t.data() + first, wide,
                            scores.data(), width);
                    product(block.rows, width, dim, {grads.data(), dim, 1}, values_t.data() + first, wide,
                            dscores.data(), width);
                    for (int64_t r = 0; r < block.rows; r++) {
                        const auto [begin, end] = block.seen(span, shape, r);
                        const int64_t t = span.start + block.first + r / repeat, h = g * repeat + r % repeat;
                        const float *o = out.of(t, h), *go = grads.data() + r * dim;
                        const float shift = lse[t * shape.heads + h];
                        float delta = 0;
#pragma omp simd reduction(+ : delta)
                        for (int64_t d = 0; d < dim; d++) delta += o[d] * go[d];
                        float *x = scores.data() + r * width - first, *dx = dscores.data() + r * width - first;
                        for (int64_t s = first; s < begin; s++) x[s] = dx[s] = 0;
#pragma omp simd
                        for (int64_t s = begin; s < end; s++) {
                            x[s] = exp_negative(std::min(x[s] - shift, 0.0f));  // in this order, what is no number stays so
                            dx[s] = x[s] * (dx[s] - delta);
                        }
                        for (int64_t s = end; s < block.end; s++) x[s] = dx[s] = 0;
                    }
                    product(block.rows, dim, seen, {dscores.data(), width, 1}, keys.data() + first * dim, dim,
                            dqueries.data(), dim);
                    product(seen, dim, block.rows, {dscores.data(), 1, width}, queries.data(), dim,
                            sums[0].data() + first * dim, dim, true);
                    product(seen, dim, block.rows, {scores.data(), 1, width}, grads.data(), dim,
                            sums[1].data() + first * dim, dim, true);
                    for (int64_t r = 0; r < block.rows; r++) {
                        float* to = dq.of(span.start + block.first + r / repeat, g * repeat + r % repeat);
                        for (int64_t d = 0; d < dim; d++) to[d] = dqueries[r * dim + d] * shape.scale;
                    }
                }
                for (int j = 0; j < 2; j++) {
                    float* apart = given[j].data() + begins[i] + g * span.prefix * dim;
                    memcpy(apart, sums[j].data(), span.prefix * dim * sizeof(float));
                    for (int64_t s = 0; s < span.length; s++)
                        memcpy(targets[j].of(span.start + s, g), sums[j].data() + (span.prefix + s) * dim,
                               dim * sizeof(float));
                }
            }
#pragma omp for collapse(2) schedule(static, 1)
        for (int j = 0; j < 2; j++)
            for (int64_t g = 0; g < shape.kv_heads; g++)
                for (int64_t i = 0; i < count; i++) {
                    const float* part = given[j].data() + begins[i] + g * all[i].prefix * dim;
                    for (int64_t s = 0; s < all[i].prefix; s++) {
                        float* to = targets[j].of(all[i].prefix_start + s, g);
                        for (int64_t d = 0; d < dim; d++) to[d] += part[s * dim + d];
                    }
                }
    }
}

}  // namespace spans

extern "C" {
// spans [count, 4]: start, length, prefix_start, prefix; strides: row and head of each of q, k, v, out.
void attend_spans(float* q, float* k, float* v, float* out, float* lse, const int64_t* all, const int64_t* strides,
                  int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t window) {
    const int64_t* s = strides;
    spans::forward({q, s[0], s[1]}, {k, s[2], s[3]}, {v, s[4], s[5]}, {out, s[6], s[7]}, lse, (const spans::Span*)all,
                   count, {heads, kv_heads, dim, window, scale});
}
// strides: of q, k, v, out, grad, dq, dk, dv.
void attend_spans_backward(float* q, float* k, float* v, float* out, float* grad, const float* lse, float* dq,
                           float* dk, float* dv, const int64_t* all, const int64_t* strides, int64_t count,
                           int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t window) {
    const int64_t* s = strides;
    spans::backward({q, s[0], s[1]}, {k, s[2], s[3]}, {v, s[4], s[5]}, {out, s[6], s[7]}, {grad, s[8], s[9]}, lse,
                    {dq, s[10], s[11]}, {dk, s[12], s[13]}, {dv, s[14], s[15]}, (const spans::Span*)all, count,
                    {heads, kv_heads, dim, window, scale});
}
}

// All layers of a decoding step of up to 8 rows as one kernel, which stays on the device from the first to the last.
//
// A step of few rows is the reading of all weights. Kernels one after the other stop reading at each border: the last
// blocks end, the next kernel starts, finds its input, and only then asks for its weights. Here one block of threads
// lives on each multiprocessor, and each of its eight warps has a ring in shared memory that it fills with the weights
// it will need next, across products, layers and meetings of all blocks, since weights depend on nothing. Meetings are
// needed because every block needs what all others have computed; while a block waits, its rings fill.
//
// A weight [N, K] is cut by rows among blocks, and by chunks of 64 columns among the warps of a block: a warp adds up
// its share of K for a tile of 16 rows of the weight and all rows of the batch with tensor cores (the weight is the left
// operand), and the block adds up the shares of its warps in their order. So results depend on nothing but the input.
// A layer has five parts with a meeting after each: qkv; attention, with rotary and the write into the cache, split along
// sequences, where the block that comes last adds up the splits; the output projection; gate and up; down. The stream
// that layers add to stays in registers of the threads that own its columns. As in few.py, others get it times the gain
// of the next norm, with sums of its squares, and a norm is a factor of the rows of a product.
//
// Set from outside: H, HQ, HKV, D (64 or 128), I, PAGE, BLOCKS (multiprocessors), DEPTH (chunks in a
// ring), STAGES (tiles of eight tokens that a warp has in flight), LAYERS, BIAS, NORMS (of queries and keys). All numbers are bfloat16, sums float. H, HQ * D and I are multiples
// of 64, PAGE is one of 8.

#include <instructions.cuh>

struct Layer {  // as resident.py writes it: 16 words of 8 bytes; weights in the order of the products
    const u16 *qkv, *out, *gate_up, *down, *bias, *q_norm, *k_norm, *before_mlp, *before_next, *cos, *sin;
    u16 *keys, *values;
    float eps_attention, eps_mlp, eps_heads, scale;
    u64 unused;
};

struct Step {
    const Layer* layers;
    const long long *tokens, *positions, *slots;
    const int *lengths, *table;
    const u16 *embedding, *before_first;
    u16 *qkv, *mixed, *act, *gained;  // [8, ·]
    float *squares, *parts, *stats;   // [8, owners]; [8 * HQ, SPLITS, D]; [8 * HQ, SPLITS]
    u32* counters;                    // zeros: of meetings, of ends, then of pairs of a sequence and a key head
    int batch, table_row;
};

__device__ constexpr int up(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int least(int a, int b) { return a < b ? a : b; }

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int G = HQ / HKV;
constexpr int N_QKV = (HQ + 2 * HKV) * D;
constexpr int PER_QKV = up(N_QKV, BLOCKS), PER_H = up(H, BLOCKS), PER_I = up(I, BLOCKS);  // rows of weights of a block
constexpr int OWNERS = up(H, PER_H);   // blocks that own columns of the stream
constexpr int TILES_H = up(PER_H, 16);
constexpr int CHUNK = 2048;            // bytes: 16 rows of 64 columns
constexpr int SHARE = 160;             // floats that a warp leaves of a tile: [16][10], two of them for the banks
constexpr int HEADS_TILE = G > 8 ? 16 : 8;
constexpr int HALF_TILE = 8 * D * 2;   // bytes of the keys, or values, of eight tokens
constexpr int TILE = 2 * HALF_TILE;
constexpr int Q_ROW = D * 2 + 16;      // bytes
constexpr int SPLITS = 32;             // of a sequence, at most
constexpr int LEAST = 2, WHOLE = 6;    // times 64 tokens: in a split; in a sequence that is not split
constexpr u32 PATIENCE = 1u << 25;     // tries, half a second to a minute: rather an error than a hang
constexpr float NONE = -1.0e30f;

// Shared memory, in bytes.
constexpr int AT_SHARES = WARPS * DEPTH * CHUNK;
constexpr int AT_TILES = AT_SHARES + 2 * WARPS * SHARE * 4;   // of tokens: STAGES for each warp
constexpr int AT_NEWEST = AT_TILES + WARPS * STAGES * TILE;   // a tile whose first token is the new one
constexpr int AT_QUERIES = AT_NEWEST + TILE;
constexpr int AT_TOPS = AT_QUERIES + HEADS_TILE * Q_ROW;      // [WARPS][16] maxima, then as many sums
constexpr int AT_SCALES = AT_TOPS + WARPS * 16 * 8;
constexpr int AT_CAME = AT_SCALES + 64;
constexpr int AT_CUTS = AT_CAME + 16;
constexpr int AT_ARRIVALS = AT_CUTS + 4 * 32;                 // [WARPS][STAGES] barriers of 8 bytes
constexpr int AT_LAYERS = up(AT_ARRIVALS + WARPS * STAGES * 8, 16) * 16;
static_assert(DEPTH >= 2, "a ring has room for what is used and what is fetched");
static_assert(G * D * 4 <= STAGES * TILE, "a warp leaves its part of attention where its tiles were");

// Small things

__device__ __forceinline__ float wide(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ u16 narrow(float x) { return (u16)narrow2(x, 0.0f); }
__device__ __forceinline__ float rounded(float x) { return wide(narrow(x)); }

__device__ __forceinline__ float over_warp(float x) {
#pragma unroll
    for (int far = 16; far; far >>= 1) x += __shfl_xor_sync(~0u, x, far);
    return x;
}

// The meeting of all blocks

// What the threads of a block wrote before they met is released by the one that counts.
__device__ __forceinline__ void arrive(const Step& s) {
    __syncthreads();
    if (threadIdx.x == 0) count_release(s.counters);
}

__device__ __forceinline__ void await(const Step& s, u32 count) {
    if (threadIdx.x == 0) {
        u32 tries = 0;
        while (read_acquire(s.counters) < count)
            if (++tries == PATIENCE) give_up();
    }
    __syncthreads();
}

// What a warp reads of weights, in the order in which it will need it. Four products a layer.

enum { QKV, OUT, GATE_UP, DOWN };

template <int OP> struct Shape;
template <> struct Shape<QKV> { static constexpr int K = H, N = N_QKV, PER = PER_QKV, HEIGHT = 16; };
template <> struct Shape<OUT> { static constexpr int K = HQ * D, N = H, PER = PER_H, HEIGHT = 16; };
template <> struct Shape<GATE_UP> { static constexpr int K = H, N = I, PER = PER_I, HEIGHT = 8; };  // pairs of rows
template <> struct Shape<DOWN> { static constexpr int K = I, N = H, PER = PER_H, HEIGHT = 16; };

template <int OP>
__device__ __forceinline__ int rows_of_block() {  // none: 0 or less
    const int left = Shape<OP>::N - (int)blockIdx.x * Shape<OP>::PER;
    return left < Shape<OP>::PER ? left : Shape<OP>::PER;
}

template <int OP>
__device__ __forceinline__ int chunks_of_warp() {
    return (Shape<OP>::K / 64 + WARPS - 1 - (int)(threadIdx.x >> 5)) / WARPS;
}

struct Cut {  // how a block reads the weights of a product
    u64 first, jump;  // bytes before its first row; to the lower eight rows of a tile
    u32 row;          // bytes
    int rows, chunks, height;

    template <int OP>
    __device__ __forceinline__ void set() {
        row = Shape<OP>::K * 2;
        first = (u64)blockIdx.x * Shape<OP>::PER * row;
        jump = OP == GATE_UP ? (u64)I * row : (u64)8 * row;
        rows = rows_of_block<OP>();
        chunks = Shape<OP>::K / 64;
        height = Shape<OP>::HEIGHT;
    }
};

struct Reader {
    int layer, op, chunk, chunks, left, height;  // left: rows of this block that are not behind us
    u32 row;
    u64 jump;
    const char *start, *at;  // of this lane, in the tile; in the chunk

    __device__ __forceinline__ void enter(const Layer* layers, const Cut* cuts) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        for (; layer < LAYERS; next()) {
            const Cut& cut = cuts[op];
            left = cut.rows;
            chunks = (cut.chunks + WARPS - 1 - warp) / WARPS;
            if (left <= 0 || chunks <= 0) continue;
            row = cut.row, jump = cut.jump, height = cut.height, chunk = 0;
            start = ((const char* const*)(layers + layer))[op] + cut.first + (u64)(lane >> 3) * row + warp * 128 + (lane & 7) * 16;
            at = start;
            return;
        }
    }

    __device__ __forceinline__ void next() {
        op = (op + 1) & 3;
        layer += op == 0;
    }

    // The next chunk into a slot of the ring: two halves of [16 rows][64 bytes], neighbouring rows exchanged in the second.
    __device__ __forceinline__ void fetch(u32 slot, const Layer* layers, const Cut* cuts) {
        if (layer < LAYERS) {
            const int lane = threadIdx.x & 31, r = lane >> 3, half = (lane >> 2) & 1;
            const u32 to = slot + half * 1024 + ((r ^ half) * 64) + (lane & 3) * 16;
            const int low = height == 8 ? r : r + 8;
            if (r < left) fetch16(to, at);
            if (r + 4 < left) fetch16(to + 256, at + 4 * row);
            if (low < left) fetch16(to + 512, at + jump);
            if (low + 4 < left) fetch16(to + 768, at + jump + 4 * row);
            at += WARPS * 128;
            if (++chunk == chunks) {
                chunk = 0;
                left -= height;
                start += height * row;
                at = start;
                if (left <= 0) {
                    next();
                    enter(layers, cuts);
                }
            }
        }
        end_group();
    }
};

// Tiles of a product whose shares meet at once.
template <int OP>
__device__ constexpr int gathered() {
    return OP == GATE_UP ? least(up(PER_I, 8), WARPS * STAGES * TILE / (WARPS * SHARE * 4)) : 1;
}

// A block's part of a decoding step

struct Block {
    const Step& s;
    const Layer* layers;  // in shared memory
    char* shared;
    u32 base;             // of shared memory
    u32 ring;             // of this warp
    int slot = 0, side = 0;
    u32 meetings = 0;
    u32 turns = 0;        // of the barriers of this warp's tiles, a bit each
    int warp, lane, g, t;
    Reader reader;
    float x[TILES_H];     // of the stream: row threadIdx.x / 16 of the batch, column threadIdx.x % 16 of each tile

    __device__ __forceinline__ Block(const Step& step, char* memory) : s(step), shared(memory) {
        warp = threadIdx.x >> 5;
        lane = threadIdx.x & 31;
        g = lane >> 2;
        t = lane & 3;
        base = (u32)__cvta_generic_to_shared(memory);
        ring = base + warp * DEPTH * CHUNK;
        layers = (const Layer*)(memory + AT_LAYERS);
    }

    __device__ __forceinline__ float* tops() { return (float*)(shared + AT_TOPS); }
    __device__ __forceinline__ float* scales() { return (float*)(shared + AT_SCALES); }
    __device__ __forceinline__ Cut* cuts() { return (Cut*)(shared + AT_CUTS); }
    __device__ __forceinline__ u32 my_tile(int tile) { return base + AT_TILES + (warp * STAGES + tile % STAGES) * TILE; }
    __device__ __forceinline__ u32 arrival(int tile) { return base + AT_ARRIVALS + (warp * STAGES + tile % STAGES) * 8; }

    // Chunk k of this warp of rows of bfloat16 [batch, K], as right operand: thread t has eight neighbours of each 32. Rows
    // and chunks that are not there are others again: a load under a condition would be waited for at its end.
    template <int K>
    __device__ __forceinline__ void read_input(u32 (&b)[2][4], const u16* rows, int k) {
        const u16* from = rows + (u64)(g < s.batch ? g : 0) * K + least(warp + WARPS * k, K / 64 - 1) * 64 + t * 8;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 v = far16(from + half * 32);
            b[half][0] = v.x, b[half][1] = v.y, b[half][2] = v.z, b[half][3] = v.w;
        }
    }

    // The oldest chunk of the ring times its part of the input; its slot takes the next one.
    __device__ __forceinline__ void multiply(float (&c)[4][4], const u32 (&b)[2][4]) {
        await_groups<DEPTH - 1>();
        __syncwarp();
        const u32 from = ring + slot * CHUNK;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 place = from + half * 1024 + ((g ^ half) * 64) + t * 16;
            const uint4 high = near16(place), low = near16(place + 512);
            mma16(c[2 * half], high.x, low.x, high.y, low.y, b[half][0], b[half][1]);
            mma16(c[2 * half + 1], high.z, low.z, high.w, low.w, b[half][2], b[half][3]);
        }
        __syncwarp();
        reader.fetch(from, layers, cuts());
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }

    // Where the warps leave what they have for a tile: `shares` of the first warp.
    __device__ __forceinline__ void leave_share(float* shares, const float (&c)[4][4]) {
        float whole[4];
#pragma unroll
        for (int i = 0; i < 4; i++) whole[i] = (c[0][i] + c[1][i]) + (c[2][i] + c[3][i]);
        float* at = shares + warp * SHARE + g * 10 + 2 * t;
        *(float2*)at = make_float2(whole[0], whole[1]);
        *(float2*)(at + 80) = make_float2(whole[2], whole[3]);
    }

    __device__ __forceinline__ float whole(const float* shares, int n, int r) {
        const float* at = shares + r * 10 + n;
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += at[w * SHARE];
        return total;
    }

    // rows @ weight.T; meanwhile() is called while the input is on its way, use(shares, tile, count) by all threads when
    // these tiles are whole. Tiles of gate and up meet many at once, where attention has its tiles.
    template <int OP, typename Meanwhile, typename Use>
    __device__ __forceinline__ void product(const u16* rows, Meanwhile meanwhile, Use use) {
        constexpr int K = Shape<OP>::K, MOST = up(K / 64, WARPS), HEIGHT = Shape<OP>::HEIGHT;
        constexpr bool kept = MOST <= 12;  // the input of all chunks stays in registers
        constexpr int BUFFER = kept ? MOST : 4;
        constexpr int GATHERED = gathered<OP>();
        const int count = rows_of_block<OP>(), chunks = chunks_of_warp<OP>();
        if (count <= 0) return;
        u32 b[BUFFER][2][4];
        if (kept)
#pragma unroll
            for (int k = 0; k < BUFFER; k++) read_input<K>(b[k], rows, k);
        meanwhile();
        const int tiles = up(count, HEIGHT);
#pragma unroll 1
        for (int from = 0; from < tiles; from += GATHERED) {
            const int here = least(GATHERED, tiles - from);
            float* shares = (float*)(shared + (GATHERED > 1 ? AT_TILES : AT_SHARES + side * WARPS * SHARE * 4));
            if (GATHERED > 1 && from > 0) __syncthreads();  // all have used those that were here
#pragma unroll 1
            for (int tile = 0; tile < here; tile++) {
                float c[4][4] = {};
                if (!kept)
#pragma unroll
                    for (int k = 0; k < BUFFER; k++) read_input<K>(b[k], rows, k);
#pragma unroll 1
                for (int first = 0; first < MOST; first += BUFFER)
#pragma unroll
                    for (int k = 0; k < BUFFER; k++) {
                        if (first + k < chunks) multiply(c, b[k]);
                        if (!kept) read_input<K>(b[k], rows, first + k + BUFFER);
                    }
                leave_share(shares + tile * WARPS * SHARE, c);
            }
            __syncthreads();
            use(shares, from, here);
            side ^= 1;
        }
    }

    // Factors of the norm of each row, from the sums of squares that all owners left.
    __device__ __forceinline__ void find_scales(float eps) {
        if (warp >= s.batch) return;
        constexpr int EACH = up(OWNERS, 32);
        float squares[EACH], total = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) squares[i] = far4(s.squares + warp * OWNERS + least(i * 32 + lane, OWNERS - 1));
#pragma unroll
        for (int i = 0; i < EACH; i++) total += i * 32 + lane < OWNERS ? squares[i] : 0.0f;
        total = over_warp(total);
        if (lane == 0) scales()[warp] = rsqrtf(total / H + eps);
    }

    // The gain of the next norm in the columns of this thread; read before it is needed.
    float gain[TILES_H];

    __device__ __forceinline__ void read_gain(const u16* all) {
#pragma unroll
        for (int tile = 0; tile < TILES_H; tile++) {
            const int r = tile * 16 + (threadIdx.x & 15);
            gain[tile] = r < rows_of_block<OUT>() ? wide(all[blockIdx.x * PER_H + r]) : 0.0f;
        }
    }

    // The stream of a tile has changed: others get it times the gain. Returns the square.
    __device__ __forceinline__ float show(int tile) {
        const int n = threadIdx.x >> 4, r = tile * 16 + (threadIdx.x & 15);
        if (n >= s.batch || r >= rows_of_block<OUT>()) return 0;
        s.gained[n * H + blockIdx.x * PER_H + r] = narrow(x[tile] * gain[tile]);
        return x[tile] * x[tile];
    }

    __device__ __forceinline__ void show_squares(float total) {
#pragma unroll
        for (int far = 8; far; far >>= 1) total += __shfl_xor_sync(~0u, total, far);
        const int n = threadIdx.x >> 4;
        if ((threadIdx.x & 15) == 0 && n < s.batch && blockIdx.x < OWNERS) s.squares[n * OWNERS + blockIdx.x] = total;
    }

    __device__ __forceinline__ void embed() {
        float total = 0;
        read_gain(s.before_first);
#pragma unroll
        for (int tile = 0; tile < TILES_H; tile++) {
            const int n = threadIdx.x >> 4, r = tile * 16 + (threadIdx.x & 15);
            x[tile] = 0;
            if (n < s.batch && r < rows_of_block<OUT>())
                x[tile] = wide(s.embedding[(u64)s.tokens[n] * H + blockIdx.x * PER_H + r]);
            total += show(tile);
        }
        show_squares(total);
    }

    template <int OP>
    __device__ __forceinline__ void add(const u16* rows) {
        float total = 0;
        product<OP>(rows, [] {}, [&](const float* shares, int tile, int) {
            const int n = threadIdx.x >> 4, r = threadIdx.x & 15;
#pragma unroll
            for (int mine = 0; mine < TILES_H; mine++)
                if (mine == tile) {
                    if (n < s.batch) x[mine] = rounded(x[mine] + rounded(whole(shares, n, r)));
                    total += show(mine);
                }
        });
        show_squares(total);
    }

    __device__ __forceinline__ void project(float eps) {
        product<QKV>(s.gained, [&] { find_scales(eps); }, [&](const float* shares, int tile, int) {
            const int n = threadIdx.x >> 4, r = tile * 16 + (threadIdx.x & 15);
            if (n < s.batch && r < rows_of_block<QKV>())
                s.qkv[n * N_QKV + blockIdx.x * PER_QKV + r] = narrow(whole(shares, n, threadIdx.x & 15) * scales()[n]);
        });
    }

    __device__ __forceinline__ void gate(float eps) {
        constexpr int GATHERED = gathered<GATE_UP>();
        product<GATE_UP>(s.gained, [&] { find_scales(eps); }, [&](const float* shares, int from, int count) {
            for (int i = threadIdx.x; i < s.batch * GATHERED * 8; i += THREADS) {
                const int n = i / (GATHERED * 8), tile = i / 8 % GATHERED, r = i & 7, column = (from + tile) * 8 + r;
                if (tile < count && column < rows_of_block<GATE_UP>()) {
                    const float* here = shares + tile * WARPS * SHARE;
                    const float scale = scales()[n];
                    const float gate = rounded(whole(here, n, r) * scale), up = rounded(whole(here, n, r + 8) * scale);
                    const float act = rounded(gate / (1.0f + power2(-1.4426950408889634f * gate))) * up;
                    s.act[n * I + blockIdx.x * PER_I + column] = narrow(act);
                }
            }
        });
    }

    // Attention. Items are pairs of a sequence and a key head, in splits; a split has whole granules of 64 tokens, of
    // which each warp takes eight neighbours.

    int row, head, split, splits, begin, end, length, tiles;  // of the item; not kept from one use to the next

    __device__ __forceinline__ void take_item(int item) {
        const int pairs = s.batch * HKV;
        int most = BLOCKS / pairs;
        most = most < 1 ? 1 : least(most, SPLITS);
        split = item % most;
        const int pair = item / most;
        row = pair / HKV;
        head = pair % HKV;
        tiles = 0;
        splits = 0;
        if (pair >= pairs) return;
        length = s.lengths[row];
        const int granules = length > 64 ? up(length, 64) : 1;
        const int each = granules <= WHOLE ? granules : up(granules, most) < LEAST ? LEAST : up(granules, most);
        splits = up(granules, each);
        if (split >= splits) return;
        begin = split * each * 64;
        end = least(length, begin + each * 64);
        const int old = least(end, length - 1) - begin - warp * 8;  // the new token is not in the cache yet
        tiles = old > 0 ? up(old, 64) : 0;
    }

    __device__ __forceinline__ int page_of(int tile) {
        return tile < tiles ? s.table[(u64)row * s.table_row + (begin + tile * 64 + warp * 8) / PAGE] : 0;
    }

    __device__ __forceinline__ void fetch_tile(const Layer& l, int tile, int page) {
        if (tile < tiles) {
            const int token = begin + tile * 64 + warp * 8, last = least(end, length - 1);
            const u64 place = (((u64)page * HKV + head) * PAGE + token % PAGE) * D;
            const u32 to = my_tile(tile);
#pragma unroll
            for (int i = 0; i < D / 32; i++) {
                const int unit = i * 32 + lane, k = unit / (D / 8), u = unit % (D / 8);
                const bool real = token + k < last;
                const u64 from = real ? place + unit * 8 : place;
                fetch16_or_zero(to + k * D * 2 + ((u ^ (4 * (k & 1))) * 16), l.keys + from, real);
                fetch16_or_zero(to + HALF_TILE + k * D * 2 + ((u ^ k) * 16), l.values + from, real);
            }
            arrive_when_copied(arrival(tile));
        }
    }

    // What attention needs beside the new rows, before these are there.
    __device__ __forceinline__ void fetch_first_tiles(const Layer& l) {
        int pages[STAGES];
#pragma unroll
        for (int i = 0; i < STAGES; i++) pages[i] = page_of(i);
#pragma unroll
        for (int i = 0; i < STAGES; i++) fetch_tile(l, i, pages[i]);
    }

    float cosine[D / 32], sine[D / 32];  // of the item's position, for the numbers of this lane

    __device__ __forceinline__ void read_angles(const Layer& l) {
        const long long position = split < splits ? s.positions[row] : 0;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const int d = lane * (D / 32) + i;
            cosine[i] = wide(l.cos[position * D + d % (D / 2)]);
            sine[i] = wide(l.sin[position * D + d % (D / 2)]);
            if (d < D / 2) sine[i] = -sine[i];
        }
    }

    // Queries of the item, and its new key and value if it has the end of the sequence: bias, norm, rotary.
    __device__ __forceinline__ void turn(const Layer& l, bool ends) {
        constexpr int E = D / 32;
        const long long place = s.slots[row];
        for (int h = warp; h < G + (ends ? 2 : 0); h += WARPS) {
            const int at = (h < G ? head * G + h : h == G ? HQ + head : HQ + HKV + head) * D + lane * E;
            float v[E], weight[E];
#pragma unroll
            for (int i = 0; i < E; i++) {
                const int d = lane * E + i;
                v[i] = wide(far2(s.qkv + row * N_QKV + at + i));
                if (BIAS) v[i] = rounded(v[i] + wide(l.bias[at + i]));
                if (NORMS) weight[i] = wide((h < G ? l.q_norm : l.k_norm)[d]);
            }
            if (h <= G) {
                if (NORMS) {
                    float total = 0;
#pragma unroll
                    for (int i = 0; i < E; i++) total += v[i] * v[i];
                    const float scale = rsqrtf(over_warp(total) / D + l.eps_heads);
#pragma unroll
                    for (int i = 0; i < E; i++) v[i] = rounded(weight[i] * rounded(v[i] * scale));
                }
#pragma unroll
                for (int i = 0; i < E; i++) {
                    const float other = __shfl_xor_sync(~0u, v[i], 16);
                    v[i] = rounded(rounded(v[i] * cosine[i]) + rounded(other * sine[i]));
                }
            }
            u16* to = (u16*)(shared + (h < G ? AT_QUERIES + h * Q_ROW : AT_NEWEST + (h - G) * HALF_TILE)) + lane * E;
            u16* stored = (h == G ? l.keys : l.values) + (((u64)(place / PAGE) * HKV + head) * PAGE + place % PAGE) * D + lane * E;
#pragma unroll
            for (int i = 0; i < E; i++) {
                to[i] = narrow(v[i]);
                if (h >= G) stored[i] = narrow(v[i]);
            }
        }
    }

    static constexpr int HALVES = HEADS_TILE / 8;
    float top[HALVES], sum[HALVES], acc[D / 8][2 * HALVES];  // of heads g and g + 8

    // Eight tokens, of which `count` are real.
    __device__ __forceinline__ void attend(const uint4 (&q)[D / 32][HEADS_TILE / 8], u32 tile, int count, float scale) {
        float c[4] = {};
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const uint4 k = near16(tile + g * D * 2 + (((4 * i + t) ^ (4 * (g & 1))) * 16));
            const uint4 high = q[i][0], low = HEADS_TILE > 8 ? q[i][HEADS_TILE / 8 - 1] : make_uint4(0, 0, 0, 0);
            mma16(c, high.x, low.x, high.y, low.y, k.x, k.y);
            mma16(c, high.z, low.z, high.w, low.w, k.z, k.w);
        }
        u32 weights[2] = {};
        float fade[HALVES];
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const float a = 2 * t < count ? c[2 * half] * scale : NONE, b = 2 * t + 1 < count ? c[2 * half + 1] * scale : NONE;
            float high = fmaxf(a, b);
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            high = fmaxf(high, top[half]);
            const float first = 2 * t < count ? power2(a - high) : 0.0f, second = 2 * t + 1 < count ? power2(b - high) : 0.0f;
            fade[half] = power2(top[half] - high);
            sum[half] = sum[half] * fade[half] + first + second;  // of this thread's tokens
            top[half] = high;
            weights[half] = narrow2(first, second);
        }
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            u32 v[4];
            const int k = lane & 7, u = 4 * i + (lane >> 3);
            load_transposed(v, tile + HALF_TILE + k * D * 2 + ((u ^ k) * 16));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float into[4] = {};
#pragma unroll
                for (int k = 0; k < 2 * HALVES; k++) into[k] = acc[4 * i + j][k] * fade[k / 2];
                mma8(into, weights[0], weights[1], v[j]);
#pragma unroll
                for (int k = 0; k < 2 * HALVES; k++) acc[4 * i + j][k] = into[k];
            }
        }
    }

    __device__ __forceinline__ void attend_item(const Layer& l) {
        const bool ends = length > 0 && end == length;
        turn(l, ends);
        __syncthreads();
        uint4 q[D / 32][HEADS_TILE / 8];
#pragma unroll
        for (int i = 0; i < D / 32; i++)
#pragma unroll
            for (int half = 0; half < HEADS_TILE / 8; half++)
                q[i][half] = near16(base + AT_QUERIES + (half * 8 + g) * Q_ROW + i * 64 + t * 16);
        const float scale = l.scale * 1.4426950408889634f;
#pragma unroll
        for (int half = 0; half < HALVES; half++) top[half] = NONE, sum[half] = 0;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
#pragma unroll
            for (int k = 0; k < 2 * HALVES; k++) acc[i][k] = 0;
        const int last = least(end, length - 1);
        int next_page = page_of(STAGES);
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            await_arrival(arrival(tile), turns >> (tile % STAGES) & 1);
            turns ^= 1u << (tile % STAGES);
            attend(q, my_tile(tile), last - (begin + tile * 64 + warp * 8), scale);
            __syncwarp();
            const int page = next_page;
            next_page = page_of(tile + STAGES + 1);
            fetch_tile(l, tile + STAGES, page);
        }
        if (ends && warp == 0) attend(q, base + AT_NEWEST, 1, scale);
        leave_part();
        join_warps(splits == 1);
        if (splits > 1) join_splits();
    }

    // What this warp has found, [G, D], goes where its tiles were.
    __device__ __forceinline__ float* part_of(int w) { return (float*)(shared + AT_TILES + w * STAGES * TILE); }

    __device__ __forceinline__ void leave_part() {
        __syncwarp();
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
            sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
            const int h = half * 8 + g;
            if (h < G) {
                if (t == 0) tops()[warp * 16 + h] = top[half], tops()[(WARPS + warp) * 16 + h] = sum[half];
#pragma unroll
                for (int i = 0; i < D / 8; i++)
                    *(float2*)(part_of(warp) + h * D + i * 8 + 2 * t) = make_float2(acc[i][2 * half], acc[i][2 * half + 1]);
            }
        }
    }

    // The parts of all warps together: for the output, or as one of several splits.
    __device__ __forceinline__ void join_warps(bool last) {
        __syncthreads();
        for (int i = threadIdx.x; i < G * D; i += THREADS) {
            const int h = i / D, d = i % D;
            float high = NONE, total = 0, mixed = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) high = fmaxf(high, tops()[w * 16 + h]);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float weight = power2(tops()[w * 16 + h] - high);
                total += weight * tops()[(WARPS + w) * 16 + h];
                mixed += weight * part_of(w)[i];
            }
            mixed /= total > 0 ? total : 1.0f;
            const int query = row * HQ + head * G + h;
            if (last) {
                s.mixed[query * D + d] = narrow(mixed);
            } else {
                s.parts[(query * SPLITS + split) * D + d] = mixed;
                if (d == 0) s.stats[query * SPLITS + split] = total > 0 ? high + log2f(total) : NONE;
            }
        }
    }

    // The block that comes last joins what all splits of its pair have left: its warps share them, then join.
    __device__ __forceinline__ void join_splits() {
        u32& came = *(u32*)(shared + AT_CAME);
        u32* counter = s.counters + 2 + row * HKV + head;
        __syncthreads();
        if (threadIdx.x == 0) came = count_both(counter);
        __syncthreads();
        if (came != splits - 1) return;
        if (threadIdx.x == 0) *counter = 0;
        constexpr int EACH = SPLITS / WARPS, E = D / 32;
#pragma unroll 2
        for (int h = 0; h < G; h++) {
            const int query = row * HQ + head * G + h;
            float logs[EACH], v[EACH][E], high = NONE, total = 0, mixed[E] = {};
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int k = i * WARPS + warp;
                logs[i] = NONE;
                if (k < splits) {
                    logs[i] = far4(s.stats + query * SPLITS + k);
#pragma unroll
                    for (int j = 0; j < E; j++) v[i][j] = far4(s.parts + (query * SPLITS + k) * D + j * 32 + lane);
                }
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) high = fmaxf(high, logs[i]);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (i * WARPS + warp < splits) {
                    const float weight = power2(logs[i] - high);
                    total += weight;
#pragma unroll
                    for (int j = 0; j < E; j++) mixed[j] += weight * v[i][j];
                }
            if (lane == 0) tops()[warp * 16 + h] = high, tops()[(WARPS + warp) * 16 + h] = total;
#pragma unroll
            for (int j = 0; j < E; j++) part_of(warp)[h * D + j * 32 + lane] = mixed[j];
        }
        join_warps(true);
    }

    // With more pairs than blocks none is split, and only the first of a block is fetched early.
    __device__ __forceinline__ void attend_all(const Layer& l) {
        const int pairs = s.batch * HKV;
#pragma unroll 1
        for (int item = blockIdx.x;;) {
            if (split < splits) attend_item(l);
            item += BLOCKS;
            if (item >= pairs) break;
            __syncthreads();
            take_item(item);
            fetch_first_tiles(l);
            read_angles(l);
        }
    }

    __device__ __forceinline__ void meet() {
        arrive(s);
        meetings += BLOCKS;
    }

    __device__ __forceinline__ void run() {
        for (int i = threadIdx.x; i < LAYERS * (int)sizeof(Layer) / 16; i += THREADS)
            ((uint4*)(shared + AT_LAYERS))[i] = ((const uint4*)s.layers)[i];
        for (int i = threadIdx.x; i < (AT_TOPS - AT_NEWEST) / 16; i += THREADS)
            ((uint4*)(shared + AT_NEWEST))[i] = make_uint4(0, 0, 0, 0);
        if (threadIdx.x < WARPS * STAGES) begin_arrivals(base + AT_ARRIVALS + threadIdx.x * 8, 32);
        if (threadIdx.x == 0) {
            cuts()[QKV].set<QKV>();
            cuts()[OUT].set<OUT>();
            cuts()[GATE_UP].set<GATE_UP>();
            cuts()[DOWN].set<DOWN>();
        }
        __syncthreads();
        reader.layer = reader.op = 0;
        reader.enter(layers, cuts());
        for (int i = 0; i < DEPTH; i++) reader.fetch(ring + i * CHUNK, layers, cuts());
        embed();
        meet();
        for (int i = 0; i < LAYERS; i++) {
            const Layer& l = layers[i];
            take_item(blockIdx.x);
            fetch_first_tiles(l);
            await(s, meetings);
            project(l.eps_attention);
            meet();
            take_item(blockIdx.x);
            read_angles(l);
            await(s, meetings);
            attend_all(l);
            meet();
            read_gain(l.before_mlp);
            await(s, meetings);
            add<OUT>(s.mixed);
            meet();
            await(s, meetings);
            gate(l.eps_mlp);
            meet();
            read_gain(l.before_next);
            await(s, meetings);
            add<DOWN>(s.act);
            if (i + 1 < LAYERS) meet();
        }
        await_groups<0>();
        if (threadIdx.x == 0 && atomicAdd(s.counters + 1, 1) == BLOCKS - 1) s.counters[0] = s.counters[1] = 0;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_layers(const Step step) {
    extern __shared__ __align__(128) char memory[];
    Block(step, memory).run();
}

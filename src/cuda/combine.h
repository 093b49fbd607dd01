/*
 * combine.h - merges the partial results of attend.h into output and log-sum-exp of each query head. One thread block
 * works on one (entry, query, head), one thread on one channel. Results in the rotated basis of R formats are summed
 * separately, and rotated back once.
 */
#ifndef TKVCU_COMBINE_H
#define TKVCU_COMBINE_H

#include "attend.h"

#define TKVCU_COMBINE_THREADS 128

/* Rotates a window x[0 .. n-1] in shared memory by core/rotate.h, without signs. Uses n / 2 threads. */
TKVCU_DEVICE void tkvcu_rotate_window(float *x, int n, int log2n) {
    const int tid = (int)threadIdx.x;
    int h;
    for (h = 1; h < n; h *= 2) {
        __syncthreads();
        if (tid < n / 2) {
            const int i = tid / h * 2 * h + tid % h;
            const float a = x[i], b = x[i + h];
            x[i] = a + b;
            x[i + h] = a - b;
        }
    }
    __syncthreads();
    if (tid < n) x[tid] *= tkvi_hadamard_norm[log2n];
    __syncthreads();
}

/* The slots of a section, in the order of the thread blocks that worked on it: first, first + 1 .. */
typedef struct tkvcu_slots {
    const float *column; /* of the first slot */
    size_t stride;       /* floats from slot to slot */
    int n;
} tkvcu_slots;

/* Returns the sum of slots [from, from + n) for channel `tid`. Loads do not wait for each other: a slot comes from far
 * away. */
TKVCU_DEVICE float tkvcu_add_slots(const tkvcu_slots &s, int from, int n, const float *weight, int tid) {
    enum { AT_ONCE = 16 };
    const float *x = s.column + (size_t)from * s.stride + 2 + (size_t)tid;
    float sum = 0.0f;
    int i, k;
    TKVCU_ROLL
    for (i = 0; i < n; i += AT_ONCE, x += AT_ONCE * s.stride) {
        float y[AT_ONCE];
        TKVCU_UNROLL
        for (k = 0; k < AT_ONCE; k++) y[k] = i + k < n ? x[(size_t)k * s.stride] : 0.0f;
        TKVCU_UNROLL
        for (k = 0; k < AT_ONCE; k++) sum += y[k] * weight[i + k]; /* weights behind the last one are 0 */
    }
    return sum;
}

/* Returns the maximum or the sum over all threads. `x` has space for a number of each warp. */
TKVCU_DEVICE float tkvcu_block_max(float y, float *x) {
    int i;
    TKVCU_UNROLL
    for (i = 16; i > 0; i /= 2) y = fmaxf(y, __shfl_xor_sync(0xffffffffu, y, i));
    if (threadIdx.x % 32 == 0) x[threadIdx.x / 32] = y;
    __syncthreads();
    for (i = 0; i < TKVCU_COMBINE_THREADS / 32; i++) y = fmaxf(y, x[i]);
    __syncthreads();
    return y;
}

TKVCU_DEVICE float tkvcu_block_sum(float y, float *x) {
    int i;
    TKVCU_UNROLL
    for (i = 16; i > 0; i /= 2) y += __shfl_xor_sync(0xffffffffu, y, i);
    if (threadIdx.x % 32 == 0) x[threadIdx.x / 32] = y;
    __syncthreads();
    for (i = 1, y = x[0]; i < TKVCU_COMBINE_THREADS / 32; i++) y += x[i];
    __syncthreads();
    return y;
}

__global__ void __launch_bounds__(TKVCU_COMBINE_THREADS)
    tkvcu_combine_kernel(tkvcu_job j, int columns, int column_tiles) {
    __shared__ int before[TKVCU_COMBINE_THREADS], all[TKVCU_COMBINE_THREADS];
    __shared__ float x[TKV_MAX_HEAD_DIM], weight[TKVCU_COMBINE_THREADS];
    const int dim = j.view.head_dim, heads = j.view.n_kv_heads, group = j.view.n_heads / heads;
    const int head = (int)blockIdx.x % j.view.n_heads, query = (int)blockIdx.x / j.view.n_heads % j.n_queries;
    const int entry = (int)blockIdx.x / j.view.n_heads / j.n_queries, tid = (int)threadIdx.x;
    const int column = query * group + head % group;
    const size_t row = (size_t)entry * (size_t)j.n_queries + (size_t)query;
    const size_t column_floats = (size_t)(dim + 2),
                 slot_floats = (size_t)(column_tiles * columns) * column_floats;
    const float *first_slot = j.partial + (size_t)column * column_floats; /* start of the column in slot 0 */
    tkvcu_visible visible;
    tkvcu_slots slots[TKVCU_SECTIONS];
    float sum[2], l = 0.0f, top = TKVCU_INITIAL_MAX, sink = TKVCU_MASKED_LOGIT;
    int e, i, c, section, place, total, blocks;
    int places_before = 0, places_total = 0;
    for (e = tid; e < j.n_entries; e += TKVCU_COMBINE_THREADS) {
        const int n = heads * tkvcu_n_places(tkvcu_find_visible(j, e));
        if (e < entry) places_before += n;
        places_total += n;
    }
    before[tid] = places_before;
    all[tid] = places_total;
    __syncthreads();
    for (i = TKVCU_COMBINE_THREADS / 2; i > 0; i /= 2) {
        if (tid < i) {
            before[tid] += before[tid + i];
            all[tid] += all[tid + i];
        }
        __syncthreads();
    }
    total = all[0];
    blocks = total < j.blocks ? total : j.blocks; /* as in tkvcu_find_first_place */
    visible = tkvcu_find_visible(j, entry);
    if (visible.seq < 0) {
        if (tid == 0 && j.entries[entry] >= 0) atomicOr(j.flags, TKVCU_FLAG_SEQUENCE);
        return;
    }
    place = before[0] + head / group * tkvcu_n_places(visible);
    first_slot += (size_t)((entry * heads + head / group) * TKVCU_SECTIONS) * slot_floats;
    TKVCU_UNROLL
    for (section = 0; section < TKVCU_SECTIONS; section++) { /* thread blocks that worked on the section */
        tkvcu_slots &k = slots[section];
        int first;
        k.stride = slot_floats;
        k.column = first_slot;
        k.n = 0;
        if (visible.key_tiles[section] == 0) continue;
        place += TKVCU_START_PLACES;
        first = tkvcu_find_worker(total, blocks, place);
        k.column += (size_t)(first + section) * slot_floats;
        place += visible.key_tiles[section];
        k.n = tkvcu_find_worker(total, blocks, place - 1) - first + 1;
        for (i = tid; i < k.n; i += TKVCU_COMBINE_THREADS) top = fmaxf(top, k.column[(size_t)i * k.stride]);
    }
    top = tkvcu_block_max(top, weight);
    if (j.sink_logits) {
        sink = j.sink_logits[head] * TKVCU_LOG2E;
        top = fmaxf(top, sink);
        if (tid == 0) l = tkvcu_ex2(sink - top);
    }
    sum[0] = sum[1] = 0.0f;
    TKVCU_UNROLL
    for (section = 0; section < TKVCU_SECTIONS; section++) {
        const tkvcu_slots &k = slots[section];
        const int rotated =
            section < 2 &&
            j.view.side[((size_t)section * (size_t)heads + (size_t)(head / group)) * 2 + 1].kind == TKVCU_R;
        TKVCU_ROLL
        for (c = 0; c < k.n; c += TKVCU_COMBINE_THREADS) {
            const int n = tkvi_min(TKVCU_COMBINE_THREADS, k.n - c);
            float part;
            weight[tid] = 0.0f;
            if (tid < n) {
                const float *p = k.column + (size_t)(c + tid) * k.stride;
                weight[tid] = tkvcu_ex2(p[0] - top);
                l += p[1] * weight[tid];
            }
            __syncthreads();
            part = tid < dim ? tkvcu_add_slots(k, c, n, weight, tid) : 0.0f;
            if (rotated) sum[1] += part;
            else sum[0] += part;
            __syncthreads();
        }
    }
    l = tkvcu_block_sum(l, weight);
    if (tid < dim) x[tid] = sum[1];
    c = 0;
    while (dim >> (c + 1)) c++;
    if (1 << c < dim) tkvcu_rotate_window(x + dim - (1 << c), 1 << c, c);
    tkvcu_rotate_window(x, 1 << c, c);
    if (tid < dim) {
        const float y = tkvi_signs[tid / 32] >> tid % 32 & 1 ? -x[tid] : x[tid];
        const float out = l != 0.0f ? (sum[0] + y) / l : 0.0f; /* a NaN in l stays a NaN */
        tkvcu_store_element(j.out, j.type,
                            (row * (size_t)j.view.n_heads + (size_t)head) * (size_t)dim + (size_t)tid, out);
    }
    if (tid == 0 && j.lse)
        j.lse[row * (size_t)j.view.n_heads + (size_t)head] =
            l != 0.0f ? 0.69314718f * (top + log2f(l)) : -INFINITY;
}

/* >>sizes and launch */
typedef struct tkvcu_attend_call {
    const void *q;
    void *out;
    float *lse;
    const float *sink_logits;
    const int32_t *seq_map;
    uint32_t *flags;
    int32_t type, n_queries, window;
    float scale, softcap;
} tkvcu_attend_call;

typedef void (*tkvcu_attend_function)(tkvcu_job);

typedef struct tkvcu_grid { /* a launch for 4 or 8 columns */
    tkvcu_attend_function kernel;
    size_t shared;
    int blocks;
} tkvcu_grid;

typedef struct tkvcu_attend_plan { /* equal for all calls */
    float *partial;
    int n_seqs;
    int slot_bytes;     /* of a slot in shared memory */
    int groups;         /* groups of V channels: 2 for KIVI with head_dim 128, else 1 */
    tkvcu_grid grid[2]; /* for 1 and 2 n-tiles */
} tkvcu_attend_plan;

/* Returns the n-tiles per thread block: 1 for up to 4 columns, else 2. Columns are queries times query heads per
 * KV head. */
static int tkvcu_n_tiles(const tkv_config *cfg, int n_queries) {
    return cfg->model.n_heads / cfg->model.n_kv_heads * n_queries > 4 ? 2 : 1;
}

static int tkvcu_n_column_tiles(const tkv_config *cfg, int n_queries) {
    const int columns = 4 * tkvcu_n_tiles(cfg, n_queries);
    return (cfg->model.n_heads / cfg->model.n_kv_heads * n_queries + columns - 1) / columns;
}

/* Computes the workspace for up to max_queries queries. */
static size_t tkvcu_compute_attend_bytes(const tkv_config *cfg, int n_seqs, int max_queries) {
    const size_t slots = TKVCU_MAX_GRID + (size_t)n_seqs * (size_t)cfg->model.n_kv_heads * TKVCU_SECTIONS;
    const size_t columns =
        (size_t)(tkvcu_n_column_tiles(cfg, max_queries) * 4 * tkvcu_n_tiles(cfg, max_queries));
    return slots * columns * (size_t)(cfg->model.head_dim + 2) * sizeof(float);
}

/* Enlarges the slots for these sides (in host memory). A and R sides get space for 4 bits per value, the most of
 * any table (core/allocate.h). So a captured launch stays valid for tables that come later. */
static void tkvcu_widen_attend_plan(tkvcu_attend_plan *s, const tkvcu_side *side, size_t n, int head_dim) {
    size_t i;
    s->slot_bytes = tkvi_max(s->slot_bytes, 32 * head_dim);
    s->groups = tkvi_max(s->groups, 1);
    for (i = 0; i < n; i++) {
        if (side[i].kind == TKVCU_KIVI) s->groups = head_dim / 64;
        if (side[i].kind == TKVCU_KIVI) s->slot_bytes = tkvi_max(s->slot_bytes, (int)side[i].bytes);
        else if (side[i].kind != TKVCU_EXACT) s->slot_bytes = tkvi_max(s->slot_bytes, 36 * head_dim);
    }
}

/* Finds the kernel and its shared memory. */
static tkvcu_attend_function tkvcu_select_attend_kernel(const tkvcu_attend_plan *s, int head_dim, int n_tiles,
                                                        size_t *shared) {
    const struct {
        int head_dim, n_tiles, groups;
        tkvcu_attend_function kernel;
        size_t fixed;
        int work;
    } row[] = {
#define TKVCU_KERNEL_(D, NT, VG)                                                                             \
    {D, NT, VG, tkvcu_attend_kernel<D, NT, VG>, sizeof(tkvcu_attend_shared<D, NT>), TKVCU_WORK(D, NT, VG)}
        TKVCU_KERNEL_(64, 1, 1),  TKVCU_KERNEL_(64, 2, 1),  TKVCU_KERNEL_(128, 1, 1),
        TKVCU_KERNEL_(128, 1, 2), TKVCU_KERNEL_(128, 2, 1), TKVCU_KERNEL_(128, 2, 2),
#undef TKVCU_KERNEL_
    };
    size_t i = 0;
    while (row[i].head_dim != head_dim || row[i].n_tiles != n_tiles || row[i].groups != s->groups) i++;
    *shared = (row[i].fixed + sizeof(int) * (size_t)s->n_seqs + 127) / 128 * 128 +
              (size_t)TKVCU_WARPS * (size_t)(TKVCU_SLOTS * s->slot_bytes + row[i].work);
    return row[i].kernel;
}

/* Computes the grids for up to max_queries queries, when all sides are known. `max_shared` is the device's shared
 * memory per thread block. Every kernel gets it as its limit, because caches share kernels. *fits becomes 0 if
 * it is too small. */
static cudaError_t tkvcu_prepare_attend(tkvcu_attend_plan *s, const tkv_config *cfg, int max_queries,
                                        int multiprocessors, int max_shared, int *fits) {
    cudaError_t e = cudaSuccess;
    int n;
    for (n = 1; n <= tkvcu_n_tiles(cfg, max_queries) && e == cudaSuccess && *fits; n++) {
        tkvcu_grid *grid = &s->grid[n - 1];
        int resident = 1;
        grid->kernel = tkvcu_select_attend_kernel(s, cfg->model.head_dim, n, &grid->shared);
        *fits = grid->shared <= (size_t)max_shared;
        if (!*fits) break;
        e = cudaFuncSetAttribute(grid->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared);
        if (e == cudaSuccess)
            e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, grid->kernel, TKVCU_THREADS,
                                                              grid->shared);
        grid->blocks = tkvi_min(TKVCU_MAX_GRID, multiprocessors * tkvi_max(1, resident));
    }
    return e;
}

/* Fills the part of a job that both attention kernels share. */
static tkvcu_job tkvcu_make_job(const tkvcu_attend_plan *s, const tkvcu_view *v, const tkvcu_attend_call *c) {
    tkvcu_job j;
    memset(&j, 0, sizeof j);
    j.view = *v;
    j.q = c->q;
    j.out = c->out;
    j.lse = c->lse;
    j.sink_logits = c->sink_logits;
    j.entries = c->seq_map;
    j.flags = c->flags;
    j.partial = s->partial;
    j.type = c->type;
    j.n_entries = s->n_seqs;
    j.n_queries = c->n_queries;
    j.window = c->window;
    j.scale = c->scale;
    j.softcap = c->softcap;
    return j;
}

/* Launches attention and combination. Allocates nothing and does not wait. */
static cudaError_t tkvcu_launch_attend(const tkvcu_attend_plan *s, const tkvcu_view *v,
                                       const tkvcu_attend_call *c, const tkv_config *cfg,
                                       cudaStream_t stream) {
    const int nt = tkvcu_n_tiles(cfg, c->n_queries), column_tiles = tkvcu_n_column_tiles(cfg, c->n_queries);
    const tkvcu_grid *grid = &s->grid[nt - 1];
    tkvcu_job j = tkvcu_make_job(s, v, c);
    j.blocks = grid->blocks;
    j.slot_bytes = s->slot_bytes;
    TKVCU_LAUNCH(grid->kernel, dim3((unsigned)j.blocks, (unsigned)column_tiles), dim3(TKVCU_THREADS),
                 grid->shared, stream, j);
    TKVCU_LAUNCH(tkvcu_combine_kernel, dim3((unsigned)(s->n_seqs * c->n_queries * v->n_heads)),
                 dim3(TKVCU_COMBINE_THREADS), 0, stream, j, 4 * nt, column_tiles);
    return cudaGetLastError();
}

#endif /* TKVCU_COMBINE_H */

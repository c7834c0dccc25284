// A whole decode step in one launch, for Hopper: a cluster of thread blocks for each new token of a
// sequence and KV group. Compiled at run time (cluster.py) with -D for what stands in capitals; no headers, so
// that NVRTC needs no toolkit.
//
// The thread blocks of a cluster share the keys of their sequence and group:
//   1. compressed keys stream through each warp's own ring of shared memory (cp.async), 16 at a
//      time, so that no warp waits for another; their probabilities are pooled to selection blocks
//      as they come (Eq. 9), relative to the maximum so far;
//   2. log-sum-exps go to every thread block of the cluster, block scores are summed over the heads
//      (Eq. 10), and the best selection blocks are found by rank: each thread block tells its best
//      to all and then ranks them among everyone's. In short contexts all block sums go with the
//      log-sum-exps, so that every thread block has all scores. The window's keys arrive meanwhile,
//      or were there before;
//   3. window, forced and chosen blocks stream through the same rings;
//   4. outputs are gated and summed over warps, then over the cluster (Eq. 5).
// With FP8 the caches hold e4m3: keys and values become fp16 in registers, on their way from shared
// memory to the products, and so do the queries, each head's by a power of two of its own.
// What thread blocks tell each other goes from shared memory to shared memory, by stores that
// arrive at a barrier of the receiver's. All sums have a fixed order, so steps repeat bitwise.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define UNIT 16         // keys that a warp takes at a time
#define BYTES (FP8 ? 1 : 2)  // of a number of a key or value
#define ROW (DV * BYTES)     // bytes of a value, and of a key's first DV columns
#define CHUNKS (ROW / 16)    // of 16 bytes
#define MORE (D - DV)  // columns that keys have beyond, 0 or 64; they lie behind keys and values
#define MORE_ROW (MORE * BYTES)
#define STAGE (2 * UNIT * ROW + UNIT * MORE_ROW)
// Chunk c of row r lies where chunk c ^ SWIZZLE would, in rows of so many chunks: 8 neighbouring rows
// of a chunk are in different banks. Rows of 4 chunks are two to a line of the banks.
#define SWIZZLE(r, chunks) ((chunks) < 8 ? (r) >> 1 & 3 : (r) & 7)
#define HALF_RING (STAGES / 2 * STAGE)
#define THREADS (WARPS * 32)
#define UNITS_PER_BLOCK (L_SEL / UNIT)
#define FREE (N_SEL - N_INIT - N_LOCAL)  // blocks that scores choose
// Units whose block sums a block has: its own, or everyone's where these are at most TOLD a block.
#define KEPT (CLUSTER > 1 && CLUSTER * TOLD > UNITS ? CLUSTER * TOLD : UNITS)
// Units of which half a warp sums the scores at a time.
#define AT_ONCE (KEPT * 16 >= 4 * THREADS ? 4 : KEPT * 16 >= 2 * THREADS ? 2 : 1)
#define INFINITY_ __int_as_float(0x7f800000)
#define NEVER (-1.0e30f)  // a maximum before any key
// Probabilities are relative to a maximum so far, which serves until scores pass it by 8: outputs are
// rescaled seldom. bf16 values may be near the largest numbers of fp32, so there the probabilities
// are kept below 1; those of fp16 may reach 256, as it has no bits for small ones.
#if BF16 && !FP8
#define LEAD 8.0f
#define POOL_SCALE 8192.0f  // of sums in fp16: at most 36864, and 2^-29 of a maximum is not lost
#else
#define LEAD 0.0f
#define POOL_SCALE 32.0f
#endif
#define PAGE_ROWS (PAGE > 0 ? PAGE : 1)
#define CMP_ROWS (CMP_PAGE > 0 ? CMP_PAGE : 1)
#define ALL 0xffffffffu

enum { STEP = 0, CMP = 1, SEL = 2, WIN = 3 };  // what a launch does

#if FP8
typedef unsigned char KV;
#else
typedef u16 KV;
#endif

struct Params {
  const u16 *q;
  const KV *kc, *vc, *ks, *vs, *kw, *vw;
  const GATE *gates;
  const int *lens, *table;
  int *indices;
  u16 *out;
  int table_len, cmp_rows, sel_rows, win_rows, groups, mode;
  float scale_log2;
#if FP8
  const float *k_descale, *v_descale;  // of each sequence and group
#endif
};

// What a unit of compressed keys gives to the scores of its four selection blocks.
struct __align__(16) Pooled {
  u16 block[16][4];  // of each head
  float max[16];     // what they are relative to
  u16 spill[16];     // what its last key gives to the selection block behind
};

struct Shared {
  u16 q[16][DV];
#if D > DV
  u16 more_q[16][D - DV];
#endif
#if CLUSTER > 1
  float recv[CLUSTER][2][16 * DV / CLUSTER];  // outputs, of the heads that this block ends
#endif
  Pooled pooled[KEPT];
  int keys[KEPT * 4];            // of the selection blocks that this block of the cluster scores
  int recv_key[CLUSTER * FREE];  // of the best of every block of the cluster
  int recv_block[CLUSTER * FREE];
  int2 survivors[UNITS * 4];
  int best_key[FREE], best_at[FREE];
  int survived;  // how many there are
  int chosen[N_SEL];
  float2 recv_ml[CLUSTER][2][16];  // maxima and sums of compressed and window keys, of every block
  float2 recv_sel_ml[CLUSTER][16];  // of the selected ones
  float2 recv_spill[16];            // of the last unit of the block before, and its maxima
  float2 warp_ml[WARPS][2][16];
  float2 warp_sel_ml[WARPS][16];
#if FP8
  float q_scale[16];  // by which a head's queries were divided
#endif
  u64 bars[5];  // of all blocks: two branches' normalisers, candidates, the best, outputs are here
};
static_assert(STAGES <= 4 && STAGES % 2 == 0, "await_copies() and `seen` are for four");
static_assert(WARPS * STAGES * STAGE + sizeof(Shared) <= SHARED, "cluster.py counts fewer bytes");

// ---- instructions -----------------------------------------------------------------------------

__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// For a product.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 y;
#if BF16 && !FP8
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
  return y;
}
// For the output.
__device__ __forceinline__ u32 pack_out(float low, float high) {
#if BF16 && FP8
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return pack(low, high);
#endif
}
#if FP8
// Four numbers of e4m3 as fp16, two and two; NaN stays NaN.
__device__ __forceinline__ void halves(u32 (&y)[2], u32 x) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(y[0]), "=r"(y[1]) : "r"(x));
}
#endif
__device__ __forceinline__ u16 to_half(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float from_half(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ float gate_of(float x) { return x; }
__device__ __forceinline__ float gate_of(u16 x) {
#if BF16
  return __uint_as_float((u32)x << 16);
#else
  return from_half(x);
#endif
}
__device__ __forceinline__ u32 shared_address(const void *p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16 && !FP8
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void matrices_turned(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// Keys are read once: in the L2 they make room before anything else does, and the few queries with
// them. Where a program has a single block, steps are 1 to 3 % slower with that.
#if CLUSTER > 1
#define COPY16 "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16"
#define POLICY(i) ", %" #i ";"
#else
#define COPY16 "cp.async.cg.shared.global [%0], [%1], 16"
#define POLICY(i) ";"
#endif
__device__ __forceinline__ u64 evict_first() {
  u64 policy = 0;
#if CLUSTER > 1
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}
__device__ __forceinline__ void copy16(u32 to, const void *from, bool live) {
  asm volatile(COPY16 ", %2" POLICY(3)
               :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(live ? 16 : 0),
                  "l"(evict_first()) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void *from) {
  asm volatile(COPY16 POLICY(2)
               :: "r"(to), "l"(__cvta_generic_to_global(from)), "l"(evict_first()) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the newest `left` groups of this thread's copies have arrived.
__device__ __forceinline__ void await_copies(int left) {
  if (left == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
  else if (left == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  else if (left == 2 || STAGES == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  else if (left == 3) asm volatile("cp.async.wait_group 3;" ::: "memory");
  else asm volatile("cp.async.wait_group 4;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
#if CLUSTER > 1
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
#else
  return 0;
#endif
}
// Address `at` in block `rank` of the cluster. (The cluster's own barrier tells as well, but its
// release waits for all loads under way.)
__device__ __forceinline__ u32 of_block(u32 at, int rank) {
#if CLUSTER > 1
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
#endif
  return at;
}
__device__ __forceinline__ void send(const void *to, u32 x, int rank, const u64 *bar) {
#if CLUSTER > 1
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               :: "r"(of_block(shared_address(to), rank)), "r"(x),
                  "r"(of_block(shared_address(bar), rank)) : "memory");
#else
  *(u32 *)to = x;
#endif
}
__device__ __forceinline__ void send(const void *to, float2 x, int rank, const u64 *bar) {
#if CLUSTER > 1
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];"
               :: "r"(of_block(shared_address(to), rank)), "f"(x.x), "f"(x.y),
                  "r"(of_block(shared_address(bar), rank)) : "memory");
#else
  *(float2 *)to = x;
#endif
}
__device__ __forceinline__ void send(const void *to, float4 x, int rank, const u64 *bar) {
#if CLUSTER > 1
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%1,%2,%3,%4}, [%5];"
               :: "r"(of_block(shared_address(to), rank)), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w),
                  "r"(of_block(shared_address(bar), rank)) : "memory");
#else
  *(float4 *)to = x;
#endif
}
__device__ __forceinline__ void init(const u64 *bar) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(bar)) : "memory");
}
// So many bytes will arrive at a barrier of this block.
__device__ __forceinline__ void expect(const u64 *bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(bar)), "r"(bytes) : "memory");
}
// All that was sent to this block has arrived.
__device__ __forceinline__ void receive(const u64 *bar) {
#if CLUSTER > 1
  asm volatile("{\n.reg .pred done;\n"
               "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
               "@!done bra again;\n}" :: "r"(shared_address(bar)) : "memory");
#else
  __syncthreads();
#endif
}

// ---- attention over one unit ------------------------------------------------------------------

// Rows are heads: a thread has columns of heads lane / 4 and lane / 4 + 8.
struct Sums {
  float o[DV / 8][4];
  float m[2], l[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < DV / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] = 0.0f;
    m[0] = m[1] = NEVER;
    l[0] = l[1] = 0.0f;
  }
  // l of whole rows: until then each thread has its own columns'.
  __device__ __forceinline__ void close() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] += __shfl_xor_sync(ALL, l[r], 1);
      l[r] += __shfl_xor_sync(ALL, l[r], 2);
    }
  }
};

// N units, of which keys begin..end are seen. p: the probabilities, relative to sums.m. scale: of
// the scores of this thread's two heads.
// Thread t of a head has columns 8 i + 2 t and the next in Sums.o[i]. With FP8 a register holds four
// numbers: of each 16 columns 4 t and 4 t + 2 are in an even o[i], 4 t + 1 and 4 t + 3 in the next,
// and queries have another order of columns, see convert_queries().
template <int N>
__device__ __forceinline__ void attend(
    Sums &sums, float (&p)[N][2][4], u32 q, const u32 (&unit)[N], const u32 (&ends)[N],
    const float (&scale)[2]) {
  const int lane = threadIdx.x % 32, row = lane % 16;
  const u32 at_q = q + row * DV * 2 + ((lane / 16 ^ (row & 7)) << 4);
  const u32 at_k = (row & 7) * ROW + ((lane / 8 ^ SWIZZLE(row & 7, CHUNKS)) << 4);
  const u32 more_q = q + 16 * DV * 2 + row * MORE * 2 + ((lane / 16 ^ (row & 7)) << 4);
  const u32 more_k = 2 * UNIT * ROW + (row & 7) * MORE_ROW +
                     ((lane / 8 ^ SWIZZLE(row & 7, MORE_ROW / 16)) << 4);
  // A product waits for the one before: sums of two units, or two of one.
  float s[2][2][4] = {};
  const int columns = 64 / BYTES, steps = columns / 16;  // of four chunks of keys
#pragma unroll
  for (int j = 0; j < D / columns; ++j) {
    const bool first = j < DV / columns;
    const u32 from_q = first ? at_q ^ (steps * j << 5) : more_q ^ (steps * j - DV / 16 << 5);
    u32 a[steps][4];
#pragma unroll
    for (int i = 0; i < steps; ++i) matrices(a[i], from_q ^ (i << 5));
    u32 b[N][2][4];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const u32 from_k = first ? (unit[n] + at_k) ^ (j << 6)
                               : (unit[n] + more_k) ^ (j - DV / columns << 6);
      matrices(b[n][0], from_k);
      matrices(b[n][1], from_k + 8 * (first ? ROW : MORE_ROW));
    }
#if FP8
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          u32 x[2];
          halves(x, b[n][tile][i]);
          product(s[N == 2 ? n : i % 2][tile], a[i], x[0], x[1]);
        }
#else
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        product(s[n][tile], a[0], b[n][tile][0], b[n][tile][1]);
        product(s[N == 2 ? n : 1][tile], a[1], b[n][tile][2], b[n][tile][3]);
      }
#endif
  }
  if (N == 1) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[0][tile][j] += s[1][tile][j];
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int begin = ends[n] & 255, end = ends[n] >> 8 & 255;
    if (begin > 0 || end < UNIT) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int key = tile * 8 + lane % 4 * 2 + j % 2;
          if (key < begin || key >= end) s[n][tile][j] = -INFINITY_;
        }
    }
  }
  float top[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float x = s[0][0][2 * r];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
        x = fmaxf(x, fmaxf(s[n][tile][2 * r], s[n][tile][2 * r + 1]));
    x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
    top[r] = fmaxf(x, __shfl_xor_sync(ALL, x, 2)) * scale[r];
  }
  const bool passed[2] = {top[0] > sums.m[0] + (8.0f - LEAD), top[1] > sums.m[1] + (8.0f - LEAD)};
  if (__any_sync(ALL, passed[0] || passed[1])) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m = passed[r] ? top[r] + LEAD : sums.m[r];
      const float alpha = exp2_(sums.m[r] - m);
      sums.m[r] = m;
      sums.l[r] *= alpha;
#pragma unroll
      for (int i = 0; i < DV / 8; ++i) {
        sums.o[i][2 * r] *= alpha;
        sums.o[i][2 * r + 1] *= alpha;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        p[n][tile][j] = exp2_(s[n][tile][j] * scale[j / 2] - sums.m[j / 2]);
        sums.l[j / 2] += p[n][tile][j];
      }
  u32 a[N][4];
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) a[n][i] = pack(p[n][i / 2][i % 2 * 2], p[n][i / 2][i % 2 * 2 + 1]);
  const u32 at = UNIT * ROW + row * ROW + ((lane / 16 ^ SWIZZLE(row, CHUNKS)) << 4);
#pragma unroll
  for (int j = 0; j < ROW / 32; ++j)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      u32 b[4];
      matrices_turned(b, (unit[n] + at) ^ (j << 5));
#if FP8
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // a register has two columns of a key, then those of the next
        u32 x[2], y[2];
        halves(x, __byte_perm(b[2 * i], 0, 0x3120));
        halves(y, __byte_perm(b[2 * i + 1], 0, 0x3120));
        product(sums.o[4 * j + 2 * i], a[n], x[0], y[0]);
        product(sums.o[4 * j + 2 * i + 1], a[n], x[1], y[1]);
      }
#else
      product(sums.o[2 * j], a[n], b[0], b[1]);
      product(sums.o[2 * j + 1], a[n], b[2], b[3]);
#endif
    }
}

#if FP8
// Where a column of a head's queries and the next one lie.
__device__ __forceinline__ u32 *query(Shared &shared, int head, int column) {
  const int chunk = column % DV / 8 ^ (head & 7);
#if D > DV
  if (column >= DV) return (u32 *)(shared.more_q[head] + chunk * 8 + column % 8);
#endif
  return (u32 *)(shared.q[head] + chunk * 8 + column % 8);
}

// Queries, which the copies brought, as fp16 of up to 2^15, in an order of columns as a register of
// keys has them: of each 16 the pairs 0, 2, 4 and 6 come first. A warp takes a head at a time; the
// caller waits before and after.
__device__ __forceinline__ void convert_queries(Shared &shared) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int head = threadIdx.x / 32; head < 16; head += WARPS) {
    u32 x[D / 64];
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 64; ++i) {  // two columns
      const int column = (lane + 32 * i) * 2;
      x[i] = *query(shared, head, column);
      most = fmaxf(most, fmaxf(fabsf(gate_of((u16)x[i])), fabsf(gate_of((u16)(x[i] >> 16)))));
    }
#pragma unroll
    for (int i = 1; i < 32; i *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, i));
    // A power of two that makes the largest one 2^14 to 2^15; of zeros it is some number.
    const int n = min(268 - (__float_as_int(most) >> 23), 191);
    const float by = __int_as_float(n << 23);
    __syncwarp();
    if (lane == 0) shared.q_scale[head] = __int_as_float(254 - n << 23);
#pragma unroll
    for (int i = 0; i < D / 64; ++i) {
      const int column = (lane + 32 * i) * 2, pair = column / 2 % 8;
      *query(shared, head, (column & ~15) + (pair / 2 + pair % 2 * 4) * 2) =
          pack(gate_of((u16)x[i]) * by, gate_of((u16)(x[i] >> 16)) * by);
    }
  }
}
#endif

// Probabilities of a unit's compressed keys to its four selection blocks. A key that reaches into
// the block behind its own gives half of its weight there (l = 2 d), or nothing does (l = d).
__device__ __forceinline__ void pool(
    Pooled &pooled, const float (&p)[2][4], const float (&m)[2], bool live) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  const bool last = OVERLAP && t % 2 == 1;  // this thread has the last key of a block
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = lane / 4 + 8 * r;
    float before = 0.0f;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float second = p[tile][2 * r + 1] * (last ? 0.5f : 1.0f);
      float own = p[tile][2 * r] + second;
      own += __shfl_xor_sync(ALL, own, 1);
      const float over = __shfl_sync(ALL, last ? second : 0.0f, (lane & ~3) | ((t + 3) & 3));
      own += t == 2 ? over : before;
      if (live && t % 2 == 0)
        pooled.block[head][tile * 2 + t / 2] = to_half(own * POOL_SCALE);
      before = over;
    }
    if (live && t == 0) {
      pooled.spill[head] = to_half(before * POOL_SCALE);
      pooled.max[head] = m[r];
    }
  }
}

// 1 where x > y, neither below -1: two instructions, and no predicate to wait for.
__device__ __forceinline__ int above(int x, int y) { return (u32)(y - x) >> 31; }

#define TEAM 8  // threads that rank a key
#define FEW 96  // keys that are ranked each

// The rank of key i among n, the earlier of equal ones first; TEAM neighbouring threads call it.
__device__ __forceinline__ int rank_of(const int *keys, int n, int i) {
  const int part = threadIdx.x % TEAM, fours = n / 4, mine = keys[i];
  int before[4] = {};
#pragma unroll 2
  for (int four = part; four < fours; four += TEAM) {
    const int4 other = ((const int4 *)keys)[four];
    const int below = mine - above(i / 4, four);  // of those ahead also the equal ones come first
    before[0] += above(other.x, below), before[1] += above(other.y, below);
    before[2] += above(other.z, below), before[3] += above(other.w, below);
  }
  if (part < 3) {  // of the same four, and those behind the last four
    const int j = i / 4 * 4 + part, rest = fours * 4 + part;
    if (j < i && j < fours * 4) before[0] += keys[j] == mine;
    if (rest < n) before[1] += above(keys[rest], mine - above(i, rest));
  }
  int rank = before[0] + before[1] + before[2] + before[3];
#pragma unroll
  for (int i = 1; i < TEAM; i *= 2) rank += __shfl_xor_sync(ALL, rank, i);
  return rank;
}

// The best FREE of many keys by rank, and where they stand; the whole block calls. Only those are
// ranked that reach what FREE of the lanes' largest reach.
__device__ __forceinline__ void find_of_many(Shared &shared, const int *keys, int n) {
  const int lane = threadIdx.x % 32;
  int top = 0, larger = 0;
#pragma unroll 4
  for (int i = lane; i < n; i += 32) top = max(top, keys[i]);
#pragma unroll 8
  for (int i = 1; i < 32; ++i) larger += above(__shfl_sync(ALL, top, lane + i), top);
  const int bound = max(__reduce_min_sync(ALL, larger < FREE ? top : 0x7fffffff), 1);
#pragma unroll 1
  for (int i = threadIdx.x; i < (n + 31) / 32 * 32; i += THREADS) {
    const int key = i < n ? keys[i] : 0;
    const u32 those = __ballot_sync(ALL, key >= bound);
    int at = 0;
    if (lane == 0 && those) at = atomicAdd(&shared.survived, __popc(those));
    at = __shfl_sync(ALL, at, 0) + __popc(those & ((1u << lane) - 1));
    if (key >= bound) shared.survivors[at] = make_int2(key, i);
  }
  __syncthreads();
  const int all = shared.survived;
#pragma unroll 1
  for (int i = threadIdx.x; i < all; i += THREADS) {
    const int2 mine = shared.survivors[i];
    int before = 0;
#pragma unroll 4
    for (int j = 0; j < all; ++j) {
      const int2 other = shared.survivors[j];
      before += other.x > mine.x || (other.x == mine.x && other.y < mine.y);
    }
    if (before < FREE) {
      shared.best_key[before] = mine.x;
      shared.best_at[before] = mine.y;
    }
  }
}

// Keys of the selection blocks of `units` units, of which first_unit is the first: scores over all
// heads as whole numbers of the same order, 0 for blocks that are forced anyway.
// lse: of head lane % 16; EARLY: of the compressed keys in the lower half of a warp.
__device__ __forceinline__ void score_blocks(
    Shared &shared, int first_unit, int units, int own, float lse) {
  // Half a warp takes a unit, a thread a head.
  const int lane = threadIdx.x % 32, head = lane % 16, which = lane % 4;
  if (EARLY) lse = __shfl_sync(ALL, lse, head);
#pragma unroll 1
  for (int begin = threadIdx.x / 32 * 2; begin < units; begin += AT_ONCE * THREADS / 16) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const int unit = begin + lane / 16 + k * THREADS / 16, at = min(unit, units - 1);
      const Pooled &pooled = shared.pooled[at];
      const float weight = head < HEADS ? exp2_(pooled.max[head] - lse) : 0.0f;
      float score[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) score[i] = from_half(pooled.block[head][i]) * weight;
      if (OVERLAP && head < HEADS && first_unit + at > 0) {
        const Pooled &previous = shared.pooled[max(at - 1, 0)];
        const float2 before = at > 0 ? make_float2(from_half(previous.spill[head]),
                                                   previous.max[head])
                                     : shared.recv_spill[head];
        score[0] += before.x * exp2_(before.y - lse);
      }
      // Sums over the half warp: block `which` is left to a thread.
      const bool odd = which & 1, high = which & 2;
      float a = odd ? score[1] : score[0], b = odd ? score[3] : score[2];
      a += __shfl_xor_sync(ALL, odd ? score[0] : score[1], 1);
      b += __shfl_xor_sync(ALL, odd ? score[2] : score[3], 1);
      float x = (high ? b : a) + __shfl_xor_sync(ALL, high ? a : b, 2);
      x += __shfl_xor_sync(ALL, x, 4);
      x += __shfl_xor_sync(ALL, x, 8);
      if (head < 4 && unit < units) {
        const int block = (first_unit + unit) * 4 + which;
        const bool free = block >= N_INIT && own - block >= N_LOCAL;
        shared.keys[unit * 4 + which] = free ? __float_as_int(x == x ? x : 0.0f) + 1 : 0;
      }
    }
  }
}

// The best blocks, in every thread block of the cluster alike: the best of each go to all; then each
// ranks its own among all of them, and tells which are chosen. If told, all have all keys already.
// units: whose keys are here; of them cmp_units from first_unit on are this block's. each: how many
// selection blocks a block tells.
__device__ __forceinline__ void choose_blocks(
    Shared &shared, bool told, int units, int first_unit, int cmp_units, int each, int rank) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int level = told; level <= (CLUSTER > 1); ++level) {
    const bool own_keys = level == 0 || told;
    const int *keys = own_keys ? shared.keys : shared.recv_key;
    const int n = own_keys ? units * 4 : CLUSTER * each;
    const int from = told ? first_unit * 4 : level == 0 ? 0 : rank * each;
    const int count = own_keys ? cmp_units * 4 : each;
    if (level == 0 && n > FEW) {
      find_of_many(shared, keys, n);
    } else {
#pragma unroll 1
      for (int first = warp * 32 / TEAM; first < count; first += THREADS / TEAM) {
        const int i = from + min(first + lane / TEAM, count - 1), at = rank_of(keys, n, i);
        if (first + lane / TEAM >= count || at >= FREE) continue;
        if (level == 0) {
          shared.best_key[at] = keys[i], shared.best_at[at] = i;
        } else {
          const u32 block = told ? i : shared.recv_block[i];
          for (int to = lane % TEAM; to < CLUSTER; to += TEAM)
            send(&shared.chosen[at], block, to, shared.bars + 3);
        }
      }
    }
    if (level == 0) {
      __syncthreads();
#if CLUSTER > 1
#pragma unroll 1
      for (int i = threadIdx.x; i < CLUSTER * FREE; i += THREADS) {
        const int which = i % FREE, to = i / FREE, at = rank * each + which;
        if (which >= each) continue;
        send(&shared.recv_key[at], (u32)shared.best_key[which], to, shared.bars + 2);
        send(&shared.recv_block[at], (u32)(first_unit * 4 + shared.best_at[which]), to,
             shared.bars + 2);
      }
#else
      if (threadIdx.x < FREE) shared.chosen[threadIdx.x] = shared.best_at[threadIdx.x];
#endif
    }
    receive(shared.bars + 2 + level);
  }
}

// ---- the step ---------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, OCCUPANCY)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
_decode_cluster_kernel(const __grid_constant__ Params args) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared &shared = *reinterpret_cast<Shared *>(memory + WARPS * STAGES * STAGE);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = cluster_rank(), group = blockIdx.x / CLUSTER, batch = blockIdx.y / TOKENS;
  const int G = args.groups, program = blockIdx.y * G + group, mode = args.mode;
  // Up to this cluster's token. Those of a sequence are neighbours, which read the same keys.
  const int length = args.lens[batch] - (TOKENS - 1 - (int)blockIdx.y % TOKENS);
  if (threadIdx.x == 0) shared.survived = 0;
  if (threadIdx.x < FREE) shared.best_key[threadIdx.x] = 0;
#if CLUSTER > 1
  if (threadIdx.x == 0) {
    for (int i = 0; i < 5; ++i) init(shared.bars + i);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif

  const i64 first_head = (i64)program * HEADS;
  for (int i = threadIdx.x; i < 16 * DV / 8; i += THREADS) {
    const int head = i / (DV / 8), chunk = i % (DV / 8);
    copy16(shared_address(shared.q[head]) + ((chunk ^ (head & 7)) << 4),
           args.q + (first_head + (head < HEADS ? head : 0)) * D + chunk * 8, head < HEADS);
  }
#if D > DV
  for (int i = threadIdx.x; i < 2 * MORE; i += THREADS) {
    const int head = i / (MORE / 8), chunk = i % (MORE / 8);
    copy16(shared_address(shared.more_q[head]) + ((chunk ^ (head & 7)) << 4),
           args.q + (first_head + (head < HEADS ? head : 0)) * D + DV + chunk * 8, head < HEADS);
  }
#endif
  commit();
  GATE gates[2][3];  // of this thread's heads
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = lane / 4 + 8 * r < HEADS ? lane / 4 + 8 * r : 0;
    const GATE *from = args.gates + (first_head + head) * 3;
#pragma unroll
    for (int i = 0; i < 3; ++i) gates[r][i] = from[i];
  }

  // What this block has to do, in units: compressed, window, forced and (later) chosen keys.
  const int own = (length - 1) / L_SEL;
  const int n_cmp = length >= L ? (length - L) / STRIDE + 1 : 0;
  const int all_units = own / 4 + 1;
  const int share = (all_units + CLUSTER - 1) / CLUSTER;
  const int first_unit = min(rank * share, all_units);
  const bool whole = mode == STEP, few = own + 1 <= N_SEL;
  const int cmp_units = whole || mode == CMP ? min(share, all_units - first_unit) : 0;
  // Every block gets all block sums and finds the best by itself; else each tells its best ones.
  const bool told = CLUSTER > 1 && whole && !few && share <= TOLD;
  const int kept_from = told ? first_unit : 0;  // where this block's own are kept
#if CLUSTER > 1
  if (threadIdx.x == 0) {
    const int sums = told ? (all_units - cmp_units) * (int)sizeof(Pooled) : rank > 0 ? 16 * 8 : 0;
    expect(shared.bars, (EARLY ? 2 : 1) * CLUSTER * 16 * 8 + sums);
    expect(shared.bars + 1, CLUSTER * 16 * 8);
    expect(shared.bars + 2, CLUSTER * min(FREE, share * 4) * 8);
    expect(shared.bars + 3, FREE * 4);
    expect(shared.bars + 4, 2 * 16 * DV * 4 + 16 * 8);
  }
#endif
  const int win_begin = max(length - WINDOW, 0);
  const int win_all = whole || mode == WIN ? (length - 1) / UNIT - win_begin / UNIT + 1 : 0;
  const int win_units = (win_all - rank + CLUSTER - 1) / CLUSTER;
  const int forced = few ? own + 1 : N_INIT + N_LOCAL;
  const int forced_all = whole ? forced * UNITS_PER_BLOCK : 0;
  const int from_end = CLUSTER - 1 - rank;  // who has one window unit more has no forced one more
  const int forced_units = (forced_all - from_end + CLUSTER - 1) / CLUSTER;
  const int known = cmp_units + win_units + forced_units;
  // Where all choose at the same time the memory idles: of two blocks of a multiprocessor the second
  // has the window's keys first. (With wide keys there is no register left for that.)
  const bool window_first =
      OCCUPANCY > 1 && MORE == 0 && !EARLY && whole && program / (SMS / CLUSTER) % 2;
  const int first_units = window_first ? win_units : cmp_units;
  const int chosen_all = (mode == SEL ? N_SEL : whole && !few ? FREE : 0) * UNITS_PER_BLOCK;
  const int total = known + (chosen_all - rank + CLUSTER - 1) / CLUSTER;

  if (mode == SEL) {
    if (threadIdx.x < N_SEL)
      shared.chosen[threadIdx.x] = args.indices[(i64)program * N_SEL + threadIdx.x];
    __syncthreads();
  }

  auto forced_block = [&](int i) { return few || i < N_INIT ? i : own - N_LOCAL + 1 + i - N_INIT; };
  // Calls this warp's next units into its ring, as many as there is room for.
  const u32 ring = shared_address(memory) + warp * STAGES * STAGE;
  const int k_width = G * D, v_width = G * DV;
  int issued = 0, done = 0;
  u64 seen = 0;  // of those under way the first seen key, and the first that is not, a byte each
  auto bring = [&](int limit) {
#pragma unroll 1
    for (; issued - done < STAGES && warp + issued * WARPS < limit; ++issued) {
      const KV *K, *V;
      int i = warp + issued * WARPS, key, begin = 0, end = length, rows, wrap = UNIT;
      i64 slot;
      if (window_first && i < cmp_units + win_units) i += i < win_units ? cmp_units : -win_units;
      const bool compressed = i < cmp_units;
      if (compressed) {
        K = args.kc, V = args.vc, rows = args.cmp_rows;
        slot = key = (first_unit + i) * UNIT;
        end = n_cmp;
      } else {
        i -= cmp_units;
        const bool window = i < win_units;
        if (window) {
          K = args.kw, V = args.vw, rows = args.win_rows;
          key = (win_begin / UNIT + rank + i * CLUSTER) * UNIT;
          begin = win_begin - key;
        } else {
          K = args.ks, V = args.vs, rows = args.sel_rows;
          i -= win_units;
          int block;
          if (i < forced_units) {
            i = from_end + i * CLUSTER;
            block = forced_block(i / UNITS_PER_BLOCK);
          } else {
            i = rank + (i - forced_units) * CLUSTER;
            block = shared.chosen[i / UNITS_PER_BLOCK];
          }
          key = block * L_SEL + i % UNITS_PER_BLOCK * UNIT;
          if (block < 0) end = key;  // none: nothing is seen
        }
        slot = key;
        if (RING && window) {
          slot = key % rows;
          wrap = rows - (int)slot;  // rows from there on lie where the ring begins
        } else if (PAGE > 0) {
          slot = key % PAGE_ROWS;
          const int *page = args.table + (i64)batch * args.table_len + key / PAGE_ROWS;
          if (end > key) slot += (i64)*page * PAGE;
          rows = 0;
        }
      }
      begin = max(begin, 0), end = min(max(end - key, 0), UNIT);
      const int stage = issued % STAGES;
      seen = seen & ~(0xffffull << stage * 16) | (u64)(begin | end << 8) << stage * 16;
      // A lane copies the same 16 bytes of every row / CHUNKS.
      const int chunk = lane % CHUNKS, step = 32 / CHUNKS;
      const i64 from = ((i64)batch * rows + slot + lane / CHUNKS) * G + group;
      const u32 to = ring + stage * STAGE + lane / CHUNKS * ROW;
      const int within = chunk * (16 / BYTES);
      const KV *k = K + (from * D + within), *v = V + (from * DV + within);
      // CMP_PAGE: in pages a compressed key lies in that of the last token that it is made of, where
      // few rows are neighbours.
      const bool apart = CMP_PAGE > 0 && compressed;
      auto place = [&](int r) -> i64 {  // of row r in its cache
        if (!apart) return (i64)batch * rows + slot + (RING && r >= wrap ? r - rows : r);
        const int row = key + r + L / STRIDE - 1;
        const i64 page = args.table[(i64)batch * args.table_len + row / CMP_ROWS];
        return page * CMP_ROWS + row % CMP_ROWS;
      };
      if (apart) {
#pragma unroll
        for (int j = 0; j < UNIT / step; ++j) {
          const int r = lane / CHUNKS + j * step;
          const bool live = r < end;
          const i64 at = live ? place(r) * G + group : 0;
          const u32 where = to + j * step * ROW + ((chunk ^ SWIZZLE(r, CHUNKS)) << 4);
          copy16(where, K + (at * D + within), live);
          copy16(where + UNIT * ROW, V + (at * DV + within), live);
        }
      } else if (begin == 0 && end == UNIT && (!RING || wrap >= UNIT)) {
#pragma unroll
        for (int j = 0; j < UNIT / step; ++j, k += step * k_width, v += step * v_width) {
          const int r = lane / CHUNKS + j * step;
          const u32 where = to + j * step * ROW + ((chunk ^ SWIZZLE(r, CHUNKS)) << 4);
          copy16(where, k);
          copy16(where + UNIT * ROW, v);
        }
      } else {
#pragma unroll 1
        for (int j = 0; j < UNIT / step; ++j) {
          const int r = lane / CHUNKS + j * step;
          const bool live = r >= begin && r < end;  // else nothing is read, and zeros are stored
          i64 at = (i64)j * step * k_width, v_at = (i64)j * step * v_width;
          if (RING && r >= wrap) at -= (i64)rows * k_width, v_at -= (i64)rows * v_width;
          const u32 where = to + j * step * ROW + ((chunk ^ SWIZZLE(r, CHUNKS)) << 4);
          copy16(where, live ? k + at : K, live);
          copy16(where + UNIT * ROW, live ? v + v_at : V, live);
        }
      }
      if (MORE > 0) {
        const int chunks = MORE > 0 ? MORE_ROW / 16 : 1, chunk = lane % chunks;
#pragma unroll
        for (int r = lane / chunks; r < UNIT; r += 32 / chunks) {
          const bool live = r >= begin && r < end;
          const i64 at = live ? place(r) * G + group : 0;
          const u32 where = ring + stage * STAGE + 2 * UNIT * ROW + r * MORE_ROW;
          copy16(where + ((chunk ^ SWIZZLE(r, chunks)) << 4),
                 K + (at * D + DV + chunk * (16 / BYTES)), live);
        }
      }
      commit();
    }
  };

  // Compressed keys, then the window's (or the other way round), then forced and chosen blocks. There
  // is one piece of code for all three: a step runs with cold caches, and its instructions come as
  // late as its keys. So each warp also goes through it once while its first keys are under way, with
  // none of them seen.
  // EARLY: the window is attended before blocks are chosen, and one exchange serves the normalisers
  // of both. Else the window's keys arrive while blocks are chosen, which keeps the memory busy
  // where many steps share it.
  float kept[DV / 8][4];  // outputs of compressed and window keys, each by its gate
  if (!EARLY) {
#pragma unroll
    for (int i = 0; i < DV / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) kept[i][j] = 0.0f;
  }
  float lse;  // of head lane % 16; EARLY: each half warp has a branch's
  float kept_m[2];  // EARLY: what those of compressed keys are relative to until then
  Sums sums;
  float scale[2] = {args.scale_log2, args.scale_log2}, v_descale = 1.0f;
#if FP8
  v_descale = args.v_descale[(i64)batch * G + group];
#endif
  int limit = mode == SEL ? total : known;
  bool live = false;
#pragma unroll 1
  for (int phase = 0;; ++phase) {
    // EARLY: phase 2 has no keys, but brings some of the next.
    const bool last = phase == (EARLY ? 3 : 2);
    const int phase_end =
        phase == 0 ? first_units : phase == 1 ? cmp_units + win_units : last ? total : 0;
    const int kind = phase ^ (int)window_first;  // of the first two: 0 compressed, 1 the window
    if (!EARLY || phase != 2) sums.clear();
#pragma unroll 1
    for (;;) {
      bring(limit);
      const int i = warp + done * WARPS, stage = done % STAGES;
      if (live && i >= phase_end) break;
      // Over FP8, whose rings hold four, two at a time, which hide each other's latency.
      const bool two = FP8 && live && issued - done > 1 && i + WARPS < phase_end;
      if (live) await_copies(issued - done - 1 - two);
      __syncwarp();
      const u32 ends = live ? seen >> stage * 16 : 0;
      Pooled *pooled = shared.pooled + kept_from + i - (window_first ? win_units : 0);
      if (two) {
        const int next = (done + 1) % STAGES;
        float p[2][2][4];
        attend<2>(sums, p, shared_address(shared.q), {ring + stage * STAGE, ring + next * STAGE},
                  {ends, (u32)(seen >> next * 16)}, scale);
        if (whole && kind == 0) {
          pool(pooled[0], p[0], sums.m, live);
          pool(pooled[WARPS], p[1], sums.m, live);
        }
      } else {
        float p[1][2][4];
        attend<1>(sums, p, shared_address(shared.q), {ring + stage * STAGE}, {ends}, scale);
        if (whole && kind == 0) pool(pooled[0], p[0], sums.m, live);
      }
      __syncwarp();
      if (live) {
        done += 1 + two;
      } else {
        sums.clear();
        await_copies(issued);  // of the queries
        __syncthreads();
#if FP8
        convert_queries(shared);
        __syncthreads();
        const float k_descale = args.k_descale[(i64)batch * G + group];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          scale[r] = args.scale_log2 * k_descale * shared.q_scale[lane / 4 + 8 * r];
#endif
        live = true;
      }
    }
    if (last) break;
    if (phase < 2) sums.close();
    if (phase < 2 && lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        shared.warp_ml[warp][kind][lane / 4 + 8 * r] = make_float2(sums.m[r], sums.l[r]);
    }
    if (EARLY && phase == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        kept_m[r] = sums.m[r];
#pragma unroll
        for (int i = 0; i < DV / 8; ++i) {
          kept[i][2 * r] = sums.o[i][2 * r];
          kept[i][2 * r + 1] = sums.o[i][2 * r + 1];
        }
      }
      continue;
    }

    if (phase < 2) {
      // Log-sum-exps over the cluster, of this branch or of both.
      const int first = EARLY ? 0 : kind;
      __syncthreads();
#if CLUSTER > 1
      if (EARLY || phase == 0)  // everyone's barriers are there
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
#pragma unroll 1
      for (int i = threadIdx.x; i < (EARLY ? 2 : 1) * CLUSTER * 16; i += THREADS) {
        const int head = i % 16, to = i / 16 % CLUSTER, branch = first + i / 16 / CLUSTER;
        float m = NEVER, l = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) m = fmaxf(m, shared.warp_ml[w][branch][head].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          const float2 part = shared.warp_ml[w][branch][head];
          l += part.y * exp2_(part.x - m);
        }
        send(&shared.recv_ml[rank][branch][head], make_float2(m, l), to, shared.bars + first);
        if (CLUSTER > 1 && !told && branch == 0 && to == rank + 1) {
          const Pooled &end = shared.pooled[max(cmp_units - 1, 0)];
          send(&shared.recv_spill[head], make_float2(from_half(end.spill[head]), end.max[head]),
               to, shared.bars);
        }
      }
      if (told && first == 0) {
        const float4 *mine = (const float4 *)(shared.pooled + kept_from);
#pragma unroll 1
        for (int to = warp; to < CLUSTER; to += WARPS)
          for (int i = lane; i < cmp_units * (int)(sizeof(Pooled) / 16) && to != rank; i += 32)
            send(mine + i, mine[i], to, shared.bars);
      }
      receive(shared.bars + first);
      {
        const int branch = EARLY ? lane / 16 : kind;
        float m = NEVER, l = 0.0f;
#pragma unroll
        for (int c = 0; c < CLUSTER; ++c) m = fmaxf(m, shared.recv_ml[c][branch][lane % 16].x);
#pragma unroll
        for (int c = 0; c < CLUSTER; ++c) {
          const float2 part = shared.recv_ml[c][branch][lane % 16];
          l += part.y * exp2_(part.x - m);
        }
        lse = l > 0.0f ? m + log2_(l) : l == 0.0f ? INFINITY_ : l;  // a NaN stays one
      }
      if (first == 0 && whole && !few) {
        const int units = told ? all_units : cmp_units;
        score_blocks(shared, told ? 0 : first_unit, units, own, lse);
        __syncthreads();
        choose_blocks(shared, told, units, first_unit, cmp_units, min(FREE, share * 4), rank);
      }
      if (first == 0) limit = total;
      if (EARLY) continue;
    }

    // Outputs by their gates.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = lane / 4 + 8 * r;
      const float gate = gate_of(!EARLY && kind == 0 ? gates[r][0] : gates[r][2]);
      const float by =
          gate * v_descale * exp2_(sums.m[r] - __shfl_sync(ALL, lse, EARLY * 16 + head));
      float kept_by = 1.0f;
      if (EARLY)
        kept_by =
            gate_of(gates[r][0]) * v_descale * exp2_(kept_m[r] - __shfl_sync(ALL, lse, head));
#pragma unroll
      for (int i = 0; i < DV / 8; ++i)
#pragma unroll
        for (int j = 2 * r; j < 2 * r + 2; ++j)
          kept[i][j] = kept[i][j] * kept_by + sums.o[i][j] * by;
    }
  }

  // Sums over the warps: outputs of both kinds, through the rings. Chunks of 8 columns take turns
  // by the head's number, so that threads of a warp hit different banks.
  sums.close();
#if FP8  // four columns in a row, see attend()
  const int corner = warp * STAGES * STAGE + (lane / 4 * (DV * 4 + 32) ^ lane % 4 / 2 * 32) +
                     lane % 2 * 16;
#else
  const int corner = warp * STAGES * STAGE + lane / 4 * (DV * 4 + 32) + lane % 4 * 8;
#endif
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float gate = gate_of(gates[r][1]) * v_descale;
    if (lane % 4 == 0)
      shared.warp_sel_ml[warp][lane / 4 + 8 * r] = make_float2(sums.m[r], sums.l[r]);
#if FP8
#pragma unroll
    for (int i = 0; i < DV / 8; i += 2) {
      unsigned char *to = memory + (corner ^ i * 32) + r * 8 * DV * 4;
      *(float4 *)to = make_float4(kept[i][2 * r], kept[i + 1][2 * r], kept[i][2 * r + 1],
                                  kept[i + 1][2 * r + 1]);
      *(float4 *)(to + HALF_RING) = make_float4(
          sums.o[i][2 * r] * gate, sums.o[i + 1][2 * r] * gate, sums.o[i][2 * r + 1] * gate,
          sums.o[i + 1][2 * r + 1] * gate);
    }
#else
#pragma unroll
    for (int i = 0; i < DV / 8; ++i) {
      unsigned char *to = memory + (corner ^ i * 32) + r * 8 * DV * 4;
      *(float2 *)to = make_float2(kept[i][2 * r], kept[i][2 * r + 1]);
      *(float2 *)(to + HALF_RING) =
          make_float2(sums.o[i][2 * r] * gate, sums.o[i][2 * r + 1] * gate);
    }
#endif
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < 16 * DV / 4; i += THREADS) {
    const int head = i / (DV / 4), column = i % (DV / 4) * 4;
    const int at = (head * DV + ((column / 8) ^ (head & 7)) * 8 + column % 8) * 4;
    float m = NEVER, l = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) m = fmaxf(m, shared.warp_sel_ml[w][head].x);
    float4 sum = make_float4(0, 0, 0, 0), sel = sum;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float2 ml = shared.warp_sel_ml[w][head];
      const float weight = exp2_(ml.x - m);
      l += ml.y * weight;
      const unsigned char *from = memory + w * STAGES * STAGE + at;
      const float4 a = *(const float4 *)from, b = *(const float4 *)(from + HALF_RING);
      sum.x += a.x, sum.y += a.y, sum.z += a.z, sum.w += a.w;
      sel.x += b.x * weight, sel.y += b.y * weight, sel.z += b.z * weight, sel.w += b.w * weight;
    }
#if CLUSTER > 1
    const int part = 16 * DV / CLUSTER, to = i * 4 / part;
    send(&shared.recv[rank][0][i * 4 % part], sum, to, shared.bars + 4);
    send(&shared.recv[rank][1][i * 4 % part], sel, to, shared.bars + 4);
    if (column == 0)  // a block ends whole heads
      send(&shared.recv_sel_ml[rank][head], make_float2(m, l), to, shared.bars + 4);
#else
    if (head < HEADS) {
      const float by = l == 0.0f ? 0.0f : 1.0f / l;
      *(uint2 *)(args.out + (first_head + head) * DV + column) =
          make_uint2(pack_out(sum.x + sel.x * by, sum.y + sel.y * by),
                     pack_out(sum.z + sel.z * by, sum.w + sel.w * by));
    }
#endif
  }
  if (whole && rank == 0 && warp == WARPS - 1) {  // ascending
    const int mine = lane >= N_SEL || (few && lane > own) ? (1 << 30) + lane
                     : lane < forced ? forced_block(lane) : shared.chosen[lane - forced];
    int at = 0;
#pragma unroll 4
    for (int i = 0; i < N_SEL; ++i) at += __shfl_sync(ALL, mine, i) < mine;
    if (lane < N_SEL) args.indices[(i64)program * N_SEL + at] = few && lane > own ? -1 : mine;
  }
#if CLUSTER > 1
  receive(shared.bars + 4);
  const int part = 16 * DV / CLUSTER;
  for (int i = threadIdx.x * 2; i < part; i += THREADS * 2) {
    const int head = (rank * part + i) / DV, column = (rank * part + i) % DV;
    float m = NEVER, l = 0.0f;
    float2 sum = make_float2(0, 0), sel = sum;
#pragma unroll
    for (int c = 0; c < CLUSTER; ++c) m = fmaxf(m, shared.recv_sel_ml[c][head].x);
#pragma unroll
    for (int c = 0; c < CLUSTER; ++c) {
      const float2 ml = shared.recv_sel_ml[c][head];
      const float weight = exp2_(ml.x - m);
      l += ml.y * weight;
      const float2 a = *(const float2 *)&shared.recv[c][0][i];
      const float2 b = *(const float2 *)&shared.recv[c][1][i];
      sum.x += a.x, sum.y += a.y;
      sel.x += b.x * weight, sel.y += b.y * weight;
    }
    const float by = l == 0.0f ? 0.0f : 1.0f / l;
    if (head < HEADS)
      *(u32 *)(args.out + (first_head + head) * DV + column) =
          pack_out(sum.x + sel.x * by, sum.y + sel.y * by);
  }
#endif
}

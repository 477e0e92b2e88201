/* The limit of what processes of one host can do together: loops in C over memory that they share.

   Each rank reduces its own part of all ranks' arrays and writes it into all of them, so that every byte is read once and written
   once. A rank's flag counts the barriers that it has come to, on a cache line of its own. */

#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum { LINE = 64, SPINS = 2000, BLOCK = 2048 };

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void barrier(char *flags, int rank, int ranks) {
  volatile uint64_t *mine = (volatile uint64_t *)(flags + rank * LINE);
  uint64_t count = *mine + 1;
  __atomic_store_n(mine, count, __ATOMIC_RELEASE);
  for (int other = 0; other < ranks; ++other) {
    volatile uint64_t *theirs = (volatile uint64_t *)(flags + other * LINE);
    for (int spins = 0; __atomic_load_n(theirs, __ATOMIC_ACQUIRE) < count; ++spins)
      if (spins > SPINS) sched_yield(); /* it may be waiting for this core */
  }
}

static void sum_two(float *restrict a, float *restrict b, size_t count) {
  for (size_t i = 0; i < count; ++i) a[i] = b[i] = a[i] + b[i];
}

static void sum_all(char *arrays, size_t stride, int ranks, size_t first, size_t count) {
  float sums[BLOCK];
  for (size_t start = first; start < first + count; start += BLOCK) {
    size_t n = first + count - start < BLOCK ? first + count - start : BLOCK;
    for (size_t i = 0; i < n; ++i) sums[i] = ((float *)arrays)[start + i];
    for (int rank = 1; rank < ranks; ++rank) {
      float *array = (float *)(arrays + rank * stride) + start;
      for (size_t i = 0; i < n; ++i) sums[i] += array[i];
    }
    for (int rank = 0; rank < ranks; ++rank) {
      float *array = (float *)(arrays + rank * stride) + start;
      for (size_t i = 0; i < n; ++i) array[i] = sums[i];
    }
  }
}

void all_reduce_loop(char *flags, char *arrays, size_t stride, int rank, int ranks, size_t count, int iterations,
                     int64_t *begun, int64_t *ended) {
  /* Parts of whole cache lines; the last rank has what remains. */
  size_t part = count / ranks / 16 * 16, first = rank * part;
  size_t mine = rank == ranks - 1 ? count - first : part;
  for (int i = 0; i < iterations; ++i) {
    begun[i] = now();
    barrier(flags, rank, ranks);
    if (ranks == 2)
      sum_two((float *)arrays + first, (float *)(arrays + stride) + first, mine);
    else
      sum_all(arrays, stride, ranks, first, mine);
    barrier(flags, rank, ranks);
    ended[i] = now();
  }
}

void barrier_loop(char *flags, int rank, int ranks, int iterations, int64_t *begun, int64_t *ended) {
  for (int i = 0; i < iterations; ++i) {
    begun[i] = now();
    barrier(flags, rank, ranks);
    ended[i] = now();
  }
}

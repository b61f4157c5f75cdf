/* The runtime seam: what a case runs on, for one rank. Plain C, so that a case can be built by any compiler.
 *
 * Two implementations follow the same rules:
 *   cuda  memory is device memory; the handles below ARE cudaStream_t, cudaEvent_t and, where `transport` is
 *         "nccl", ncclComm_t: cast them and use CUDA and NCCL directly;
 *   host  memory is ordinary memory; a stream is an asynchronous queue with a thread of its own, so a missing
 *         wait is a data race.
 * Only events order the work of two streams. All calls that take a stream return before the work is done.
 *
 * Threads: every rank has its own thread; the table and the handles of a rank are for that thread. Functions
 * that were `enqueue`d run on the streams' threads and make no calls on the table.
 * Errors: every function returns CPPOOL_OK or the kind of failure; `last_error` then says what happened.
 * Ownership: a case should release what it creates or allocates; what is left is released after the case, and
 * counted in `stats`.
 * Versions: all of this header is version 1, which every cppool has. Later members are appended, with a
 * comment that says so: a case asks `struct_size` for them, offsetof(cppool_runtime, MEMBER) <
 * rt->struct_size. */
#ifndef CPPOOL_RUNTIME_H
#define CPPOOL_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CPPOOL_RUNTIME_ABI 1

/* The kinds of failure; the words of `failure.kind` in a response, in lower case. */
typedef enum cppool_status {
  CPPOOL_OK = 0,
  CPPOOL_INVALID_REQUEST, /* the request is malformed or contradicts itself */
  CPPOOL_UNSUPPORTED,     /* meaningful, but not supported here: the answer is `skipped` */
  CPPOOL_MISMATCH,        /* a check failed: the answer is `failed` */
  CPPOOL_OUT_OF_MEMORY,
  CPPOOL_CUDA,
  CPPOOL_NCCL,
  CPPOOL_TIMEOUT,
  CPPOOL_INTERNAL,
  CPPOOL_INAPPLICABLE, /* meaningful, but impossible with so many ranks: the answer is `skipped` */
  CPPOOL_CANCELLED     /* the request has been cancelled: every call fails with it from then on */
} cppool_status;

typedef enum cppool_dtype {
  CPPOOL_FLOAT16,
  CPPOOL_BFLOAT16,
  CPPOOL_FLOAT32,
  CPPOOL_FLOAT64,
  CPPOOL_INT32,
  CPPOOL_INT64,
  CPPOOL_UINT8
} cppool_dtype;

typedef enum cppool_reduce { CPPOOL_SUM, CPPOOL_MAX } cppool_reduce;

/* Communicators made with the world. A pair is ranks 2i and 2i+1; a stride is the ranks of equal parity
 * (0, 2, 4, ... and 1, 3, 5, ...). PAIR and STRIDE exist for even world sizes from 4. They are special cases
 * of `group_of`: (2, 1) and (world_size / 2, 2). */
typedef enum cppool_group { CPPOOL_WORLD, CPPOOL_PAIR, CPPOOL_STRIDE } cppool_group;

typedef struct cppool_stream_s* cppool_stream; /* cudaStream_t */
typedef struct cppool_event_s* cppool_event;   /* cudaEvent_t */
typedef struct cppool_comm_s* cppool_comm;     /* ncclComm_t where `transport` is "nccl" */

/* Who caused a failure: a rank of the world (from 0), or one of these. */
#define CPPOOL_CULPRIT_SELF (-1) /* the rank that reports it */
#define CPPOOL_CULPRIT_ELSEWHERE \
  (-2) /* not that rank, and no single one is known: an abort, a communicator that failed */

/* A failed call of a rank. Later versions append. */
typedef struct cppool_failure {
  uint32_t struct_size; /* sizeof(cppool_failure) */
  cppool_status status; /* what the call returned; CPPOOL_OK: no call has failed since the case began */
  int culprit;          /* who caused it */
  const char* text;     /* as last_error */
} cppool_failure;

typedef struct cppool_runtime cppool_runtime;
struct cppool_runtime {
  uint32_t abi;         /* CPPOOL_RUNTIME_ABI */
  uint32_t struct_size; /* sizeof(cppool_runtime): later versions append */
  const char* backend;  /* "cuda" or "host" */
  int rank;             /* 0 .. world_size - 1 */
  int world_size;
  int device;           /* CUDA device ordinal of this rank; -1 on the host */
  cppool_stream stream; /* the rank's main stream; owned by the runtime */
  void* self;           /* the implementation's own */

  /* Text of this rank's last failure; valid until the next failing call. */
  const char* (*last_error)(cppool_runtime*);

  /* Memory, in stream order: usable by work enqueued on `stream` after the call. `bytes` may be 0 (then *out
   * is NULL). At least 256-byte aligned. What it holds is undefined. */
  cppool_status (*alloc)(cppool_runtime*, size_t bytes, cppool_stream stream, void** out);
  cppool_status (*free)(cppool_runtime*, void* ptr, cppool_stream stream); /* NULL is allowed */
  /* Host memory that `copy` reaches asynchronously (page-locked on cuda). Usable at once; free only after the
   * stream's work is done. */
  cppool_status (*alloc_host)(cppool_runtime*, size_t bytes, void** out);
  cppool_status (*free_host)(cppool_runtime*, void* ptr);
  /* Any direction. Pageable host memory may be reused only after the stream is synchronised. */
  cppool_status (*copy)(cppool_runtime*, void* dst, const void* src, size_t bytes, cppool_stream stream);
  cppool_status (*fill)(cppool_runtime*, void* dst, int byte, size_t bytes, cppool_stream stream);

  /* Streams and events. */
  cppool_status (*stream_create)(cppool_runtime*, cppool_stream* out);
  /* Does not wait: the stream goes when its work is done. */
  cppool_status (*stream_destroy)(cppool_runtime*, cppool_stream stream);
  /* Also reports failures of the work itself. */
  cppool_status (*stream_synchronize)(cppool_runtime*, cppool_stream stream);
  cppool_status (*event_create)(cppool_runtime*, cppool_event* out);
  cppool_status (*event_destroy)(cppool_runtime*, cppool_event event);
  cppool_status (*event_record)(cppool_runtime*, cppool_event event, cppool_stream stream);
  /* Later work on `stream` waits for the work before the event's latest record. An event never recorded is no
   * wait. */
  cppool_status (*stream_wait)(cppool_runtime*, cppool_stream stream, cppool_event event);
  /* Runs `function(argument)` on a host thread in stream order. On cuda it may make no CUDA call. */
  cppool_status (*enqueue)(cppool_runtime*, cppool_stream stream, void (*function)(void*), void* argument);

  /* Communication, in stream order; every rank of the group makes the same calls in the same order. Buffers
   * are device memory (ordinary memory on the host). `send` and `recv` between group_start and group_end run
   * together and cannot deadlock; `peer` is a rank of the group. It is an error when a case ends between
   * group_start and group_end. For a group that the world does not have, `group` returns CPPOOL_OK with
   * *out NULL and *rank and *size 0; `rank` and `size` may be NULL. See `group_of` for groups of other
   * shapes. */
  cppool_status (*group)(cppool_runtime*, cppool_group which, cppool_comm* out, int* rank, int* size);
  cppool_status (*group_start)(cppool_runtime*);
  cppool_status (*group_end)(cppool_runtime*);
  cppool_status (*send)(cppool_runtime*, const void* buffer, size_t bytes, int peer, cppool_comm comm,
                        cppool_stream stream);
  cppool_status (*recv)(cppool_runtime*, void* buffer, size_t bytes, int peer, cppool_comm comm,
                        cppool_stream stream);
  /* out[size * bytes]: the ranks' `in[bytes]` in rank order. In place when in == out + rank * bytes. */
  cppool_status (*all_gather)(cppool_runtime*, const void* in, void* out, size_t bytes, cppool_comm comm,
                              cppool_stream stream);
  /* out[count]: this rank's part of the reduction of in[size * count]. float32 and float64, int32 and int64;
   * also float16 and bfloat16. */
  cppool_status (*reduce_scatter)(cppool_runtime*, const void* in, void* out, size_t count,
                                  cppool_dtype dtype, cppool_reduce reduce, cppool_comm comm,
                                  cppool_stream stream);
  /* out[count] of in[count]; in == out is allowed. */
  cppool_status (*all_reduce)(cppool_runtime*, const void* in, void* out, size_t count, cppool_dtype dtype,
                              cppool_reduce reduce, cppool_comm comm, cppool_stream stream);

  /* Work enqueued on `stream` from here on belongs to `stage`; NULL ends the last stage. Recorded in stream
   * order and visible to the host at any time: `gpu_ms`, traces, and the diagnosis of a case that does not
   * end come from it. A stage is a path such as "forward/attend 1". The text is copied. On the main stream
   * the time of a stage counts for its parent ("forward") too. */
  cppool_status (*mark)(cppool_runtime*, cppool_stream stream, const char* stage);

  /* How the ranks exchange: "nccl"; "peer" (device copies: ranks may share a device, and a communication call
   * returns when the peers have made theirs); "host". */
  const char* transport;

  /* The communicator of this rank's group, with the world divided into groups of `size` ranks that are
   * `stride` apart. With block = size * stride, rank r is in the group first, first + stride, ..., first +
   * (size - 1) * stride, where first = r / block * block + r % stride. For 8 ranks, (4, 1) is 0-3 and 4-7,
   * and (2, 4) is 0,4 and 1,5 and 2,6 and 3,7. *rank is this rank's number in its group; `rank` and
   * `group_size` may be NULL. The result is an ncclComm_t where `transport` is "nccl".
   *
   * The communicators of cppool_group are made with the world; those of another shape are made by the first
   * calls that ask for it, and kept as long as the world. Such a call waits for all ranks of the world. So
   * every rank calls group_of with the same numbers in the same order, before or between its communication,
   * and not between group_start and group_end. With "nccl" it also waits for the rank's work on the streams
   * of this table; NCCL calls on other streams must have finished.
   *
   * CPPOOL_INVALID_REQUEST: size * stride does not divide the world size. CPPOOL_INTERNAL: the ranks ask for
   * different shapes, a rank ended its case without the call, or the call came between group_start and
   * group_end. CPPOOL_NCCL, CPPOOL_CUDA, CPPOOL_OUT_OF_MEMORY: the communicator could not be made. */
  cppool_status (*group_of)(cppool_runtime*, int size, int stride, cppool_comm* out, int* rank,
                            int* group_size);

  /* This rank's last failure with its fields; never NULL. What it points to is valid until the next failing
   * call. */
  const cppool_failure* (*last_failure)(cppool_runtime*);
};

#ifdef __cplusplus
}
#endif
#endif /* CPPOOL_RUNTIME_H */

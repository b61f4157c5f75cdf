/* The case interface: what a daemon runs on request. A case is a name, a doc line, parameters, and a function
 * that every rank calls.
 *
 * A shared library that exports
 *     const cppool_case* const* cppool_cases(void);
 * (NULL-terminated; everything it points to lives as long as the library) is loaded with
 * `cppoold --case FILE.so` and its cases are listed, validated, run and checked exactly as `attention` is,
 * which is registered through this header and uses nothing else of the daemon.
 *
 *     static cppool_status Run(cppool_case_context* c) {
 *       cppool_runtime* rt = c->runtime;
 *       ... allocate, make the inputs ...
 *       while (c->next_iteration(c)) {
 *         rt->mark(rt, rt->stream, "kernel");
 *         my_kernel<<<..., (cudaStream_t)rt->stream>>>(...);
 *         rt->mark(rt, rt->stream, NULL);
 *       }
 *       ... compare, and report with c->check(c, &check) ...
 *       return CPPOOL_OK;
 *     }
 */
#ifndef CPPOOL_CASE_H
#define CPPOOL_CASE_H

#include <cppool/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CPPOOL_CASE_ABI 1

/* How parameters are read: those of a list, which have no function of their own, from params_json. */
typedef enum cppool_type {
  CPPOOL_TYPE_INTEGER,
  CPPOOL_TYPE_NUMBER,
  CPPOOL_TYPE_BOOLEAN,
  CPPOOL_TYPE_STRING,
  CPPOOL_TYPE_INTEGER_LIST
} cppool_type;

typedef struct cppool_parameter {
  const char* name;
  cppool_type type;
  const char* default_json; /* JSON text, "4096" or "\"bf16\"" or "null"; NULL: the parameter is required */
  const char* allowed_json; /* JSON array of the allowed values; NULL: any of the type (within the range) */
  double minimum, maximum;  /* inclusive, for numbers and the elements of lists; both 0: no range */
  size_t list_length;       /* exact length of a list; 0: any */
  const char* doc;
} cppool_parameter;

/* One compared tensor of one rank. */
typedef struct cppool_check {
  const char* tensor;  /* "out", "dq", ... */
  const char* against; /* "no_cp", "oracle", ... */
  double max_abs_err;
  double rel_err; /* RMS of the difference over RMS of the reference */
  double tolerance;
  int ok;
  /* The largest error over that of a plain computation in the same dtype; 0: not compared with one. */
  double ratio;
} cppool_check;

/* Where a check does not hold. */
typedef struct cppool_location {
  /* The element that is furthest off: JSON text, "[3, 17]" or "{\"head\": 3, \"token\": 17}"; NULL: not
   * known.
   */
  const char* index_json;
  double got, wanted;
  int64_t bad;       /* elements that are further off than they may be; -1: not known */
  const char* where; /* what these have in common, for people; NULL: nothing is known */
} cppool_location;

/* What a rank's `run` has. Its functions are for the thread that `run` was called on, until it returns; a
 * case with threads of its own reports for them there. Texts and structs that they are given are copied. */
typedef struct cppool_case_context cppool_case_context;
struct cppool_case_context {
  uint32_t abi; /* CPPOOL_CASE_ABI */
  uint32_t struct_size;
  cppool_runtime* runtime; /* this rank's; owned by the daemon */
  /* The parameters, every one present, validated against the schema; the same on every rank. */
  const char* params_json;
  int checks; /* 0: the requester wants no checks */
  void* self; /* the daemon's */

  /* Parameters by name. A name or a type that the schema does not have is a bug of the case and ends it with
   * `internal`. A null parameter reads as 0 or NULL. The text lives as long as the context. */
  int64_t (*integer)(cppool_case_context*, const char* name);
  double (*number)(cppool_case_context*, const char* name);
  int (*boolean)(cppool_case_context*, const char* name);
  const char* (*string)(cppool_case_context*, const char* name);

  /* True for each of the request's iterations, then false: `warmup` + `repeat`, or with `sampling` as many as
   * the daemon finds necessary, on every rank the same. The first call waits until every rank has made it or
   * returned; when one has failed by then, it is false on every rank, so that no collective call waits for a
   * rank that could not load, allocate or prepare. What `mark` records in an iteration is timed; the median
   * is reported. Stages outside the loop are timed once. The main stream's stage may be ended, and its work
   * waited for, at any call. */
  int (*next_iteration)(cppool_case_context*);
  /* The floating-point operations this rank does in `stage` in one iteration: the answer has "tflops" for it.
   */
  void (*work)(cppool_case_context*, const char* stage, double flops);
  /* A check that does not hold makes the case `failed`, whatever `run` returns. Non-finite errors never hold.
   */
  void (*check)(cppool_case_context*, const cppool_check* check);
  /* An extra member of this rank's entry in `ranks`; json is its value's text. A text that is not JSON or
   * nested deeper than 60, or the name of a member that every entry has (rank, ok, error, gpu_ms, samples),
   * is a bug of the case and ends it with `internal`. */
  void (*result)(cppool_case_context*, const char* name, const char* json);
  /* What went wrong, for the status that `run` returns. Without it the runtime's last failure is used. When a
   * call of the runtime has failed with that same status before, its culprit is the culprit of this failure
   * too. */
  void (*fail)(cppool_case_context*, const char* detail);

  const char* dump;   /* folder that the request wants tensors in; NULL: none. Only with CPPOOL_CASE_DUMPS */
  const char* inputs; /* folder to take tensors from; NULL: none. Only with CPPOOL_CASE_TAKES_INPUTS */
  /* What `validate` has kept for this request; NULL: nothing. All ranks have the same object and only read
   * it. */
  const void* prepared;
  /* As `fail`, with the culprit as cppool_failure has it: for a case that has kept the failure of a runtime's
   * call while it released what it holds, which may have failed too. */
  void (*fail_by)(cppool_case_context*, const char* detail, int culprit);
  /* Says where the check that was reported last does not hold. An index that is no JSON object or list of
   * integers is a bug of the case and ends it with `internal`. */
  void (*locate)(cppool_case_context*, const cppool_location* location);
};

/* Relations between parameters, before any rank runs; called on one thread, with no runtime. Texts are
 * copied. */
typedef struct cppool_validation cppool_validation;
struct cppool_validation {
  uint32_t abi;
  uint32_t struct_size;
  const char* backend;
  int world_size;
  const char* params_json;
  void* self; /* the daemon's */
  int64_t (*integer)(cppool_validation*, const char* name);
  double (*number)(cppool_validation*, const char* name);
  int (*boolean)(cppool_validation*, const char* name);
  const char* (*string)(cppool_validation*, const char* name);
  /* 1 when the request itself gave the parameter, 0 when it has its default. */
  int (*given)(cppool_validation*, const char* name);
  /* Says why the status that `validate` returns is not CPPOOL_OK, naming the parameter. */
  void (*fail)(cppool_validation*, const char* detail);
  /* Most device bytes that a rank will hold at once: more than is free is answered `out_of_memory` before
   * anything is allocated. */
  void (*needs)(cppool_validation*, double bytes_per_rank);
  /* Replaces the parameters' text for `run` (a case that derives some of them from others). */
  void (*replace_params)(cppool_validation*, const char* params_json);

  /* As in cppool_case_context. `validate` should leave no trace: nothing may run after it. */
  const char* dump;
  const char* inputs;
  /* Keeps an object for the ranks of this request, which find it as `prepared`, so that not every rank reads
   * the parameters again. `release` is called with it once: when the request has ended, on any thread, when
   * it is not run, or when another object takes its place. */
  void (*prepare)(cppool_validation*, void* object, void (*release)(void* object));
  /* Names the kernels that `run` will use: the answer's member "kernels". json is an object with at least the
   * texts "name" (whose kernels), "version" and "family"; anything else is a bug of the case and answered
   * `internal`. */
  void (*kernels)(cppool_validation*, const char* json);
  /* Whose kernels are wanted: "kernels" of the request, else the daemon's `--kernels`; NULL: neither is
   * there. Only with CPPOOL_CASE_CHOOSES_KERNELS. */
  const char* wanted_kernels;
  /* A copy of the library that wanted_kernels names, to be opened in its place: each content that the library
   * has had has a copy of its own, and the daemon has opened it. NULL: wanted_kernels names no library. */
  const char* kernels_copy;
  /* Finds the kernel (cppool/attention.h) for `backend` that wanted_kernels names, of a library or cuDNN's.
   * Its table has been checked, and stays until the process ends. NULL: wanted_kernels names cppool's own, or
   * is NULL. On any status but CPPOOL_OK there is none, and the reason is given as by `fail`: return the
   * status. */
  cppool_status (*kernel)(cppool_validation*, const struct cppool_attention_kernel** kernel);
  /* Whether every rank has so much device memory free now: for a case that can do with less. `needs` is then
   * what it does with. */
  int (*has_room)(cppool_validation*, double bytes_per_rank);
};

/* Keys of a request that a case knows what to do with; a request with another is refused before `validate`.
 */
#define CPPOOL_CASE_DUMPS 1u           /* "dump" */
#define CPPOOL_CASE_TAKES_INPUTS 2u    /* "inputs" */
#define CPPOOL_CASE_CHOOSES_KERNELS 4u /* "kernels" */

typedef struct cppool_case {
  uint32_t abi;         /* CPPOOL_CASE_ABI: others are refused at start */
  uint32_t struct_size; /* sizeof(cppool_case): a smaller one than in version 1 is refused */
  const char* name;     /* letters, digits, '_', '-' and '.' */
  const char* doc;      /* one line */
  const cppool_parameter* parameters;
  size_t parameter_count;
  /* May be NULL. CPPOOL_OK, CPPOOL_INVALID_REQUEST (it can mean nothing in any world), or, for a request that
   * is `skipped`, CPPOOL_INAPPLICABLE (this world is too small or does not divide it) or CPPOOL_UNSUPPORTED.
   */
  cppool_status (*validate)(cppool_validation*);
  /* Called by every rank at once, each on its own thread. C++ exceptions must not leave it. */
  cppool_status (*run)(cppool_case_context*);
  /* CPPOOL_CASE_DUMPS, CPPOOL_CASE_TAKES_INPUTS and CPPOOL_CASE_CHOOSES_KERNELS, or 0. */
  uint32_t features;
} cppool_case;

#ifdef __cplusplus
}
#endif
#endif /* CPPOOL_CASE_H */

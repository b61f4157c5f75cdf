/* A kernel of cppool/attention.h that crashes: in forward, or with ABORTS_IN_ENTRY when its table is asked
 * for. */
#include <cppool/attention.h>
#include <stdlib.h>

static cppool_status Supports(const cppool_attention_call* call, char* why, size_t size) {
  (void)call, (void)why, (void)size;
  return CPPOOL_OK;
}

static cppool_status Prepare(const cppool_attention_call* call, void** plan, size_t* workspace, char* why,
                             size_t size) {
  (void)call, (void)why, (void)size;
  *plan = NULL;
  *workspace = 0;
  return CPPOOL_OK;
}

static int* volatile nowhere = NULL;

static cppool_status CrashForward(void* plan, const cppool_attention_tensors* tensors, void* workspace,
                                  cppool_stream stream, char* why, size_t size) {
  (void)plan, (void)tensors, (void)workspace, (void)stream, (void)why, (void)size;
  *nowhere = 1;
  return CPPOOL_OK;
}

__attribute__((visibility("default"))) const cppool_attention_kernel* const* cppool_attention(void) {
#ifdef ABORTS_IN_ENTRY
  abort();
#endif
  static const cppool_attention_kernel crashing = {CPPOOL_ATTENTION_ABI,
                                                   sizeof(crashing),
                                                   "crashing",
                                                   "1",
                                                   "host",
                                                   0,
                                                   Supports,
                                                   Prepare,
                                                   CrashForward,
                                                   NULL,
                                                   NULL};
  static const cppool_attention_kernel* const all[] = {&crashing, NULL};
  return all;
}

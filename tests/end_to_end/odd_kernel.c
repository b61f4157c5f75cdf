/* A library of kernels that differs in one thing from one that can be used. It computes nothing. */
#include <cppool/attention.h>
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

#ifndef ODD_ABI
#define ODD_ABI CPPOOL_ATTENTION_ABI
#endif
#ifndef ODD_FORWARD
#define ODD_FORWARD Forward
#endif
#ifndef ODD_BACKEND
#define ODD_BACKEND "host"
#endif
#ifndef ODD_FEATURES
#define ODD_FEATURES 0
#endif
#ifndef ODD_NAME
#define ODD_NAME "odd"
#endif
#ifndef ODD_SECOND
#define ODD_SECOND NULL
#endif

#ifndef ODD_NONE
static cppool_status Supports(const cppool_attention_call* call, char* why, size_t size) {
  (void)call;
#ifdef ODD_SUPPORTS
  ODD_SUPPORTS;
#endif
  snprintf(why, size, "nothing at all");
  return CPPOOL_UNSUPPORTED;
}

static cppool_status Prepare(const cppool_attention_call* call, void** plan, size_t* bytes, char* why,
                             size_t size) {
  (void)call, (void)plan, (void)bytes, (void)why, (void)size;
  return CPPOOL_OK;
}

__attribute__((unused)) static cppool_status Forward(void* plan, const cppool_attention_tensors* tensors,
                                                     void* workspace, cppool_stream stream, char* why,
                                                     size_t size) {
  (void)plan, (void)tensors, (void)workspace, (void)stream, (void)why, (void)size;
  return CPPOOL_OK;
}

__attribute__((visibility("default"))) const cppool_attention_kernel* const* cppool_attention(void) {
  static const cppool_attention_kernel first = {ODD_ABI,     sizeof(first), ODD_NAME, "1",
                                                ODD_BACKEND, ODD_FEATURES,  Supports, Prepare,
                                                ODD_FORWARD, NULL,          NULL};
  static cppool_attention_kernel second;
  static const cppool_attention_kernel* const all[] = {&first, NULL};
  static const cppool_attention_kernel* const both[] = {&first, &second, NULL};
  second = first;
  second.name = ODD_SECOND;
  return second.name ? both : all;
}
#else
int odd_kernel_has_no_entry;
#endif

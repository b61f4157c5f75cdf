// What libcppool_cudnn.so answers in a process of its own, in which libraries made up for it can be found.
//
//     cudnn_probe MODULE                         its version
//     cudnn_probe MODULE supports|prepare PASS DIM_QK DIM_V QUERIES KEYS ANCHOR LEFT RIGHT [EXTRA]...
//         "ok", or "status N: why"; ANCHOR: tl or br. EXTRA: a bias as bias_shape has it (1hss), alibi,
//         max_logit, deterministic, fp8, or strided: rows with gaps
#include <cppool/attention.h>

#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/attention/families/table/call.h"

using cppool::kernels::table::CallForm;

namespace {

using cppool::kernels::BiasType;

// `extras` are those behind the first eight words.
CallForm FormOf(char** words, const std::vector<std::string>& extras) {
  cppool::kernels::KernelRequest request;
  request.shape.dim_qk = std::atoi(words[1]);
  request.shape.dim_v = std::atoi(words[2]);
  request.shape.heads = 4;
  request.shape.kv_heads = 2;
  request.shape.group = 2;
  cppool::kernels::table::Rectangle where;
  where.queries = std::atoi(words[3]);
  where.keys = std::atoi(words[4]);
  bool strided = false;
  for (const std::string& extra : extras) {
    if (extra == "alibi") {
      request.bias = BiasType::kAlibi;
    } else if (extra == "max_logit") {
      request.max_logit = true;
    } else if (extra == "deterministic") {
      request.deterministic = true;
    } else if (extra == "fp8") {
      request.fp8 = {cppool::kernels::ScalingMode::kCurrent, true, false, true, true};
    } else if (extra == "strided") {
      strided = true;
    } else {  // of two sequences, as a part of a tensor with 8 keys more
      request.bias = BiasType::kPostScale;
      cppool::kernels::BiasExtent& bias = request.bias_extent;
      bias.queries = where.queries;
      bias.keys = where.keys + 8;
      std::int64_t size = bias.keys;
      const auto stride = [&](char letter, char whole, std::int64_t length) {
        if (letter != whole) return std::int64_t{0};
        const std::int64_t of_axis = size;
        size *= length;
        return of_axis;
      };
      bias.query_stride = stride(extra[2], 's', where.queries);
      bias.head_stride = stride(extra[1], 'h', 4);
      bias.batch_stride = stride(extra[0], 'b', 2);
      where.batch = 2;
      where.sequence_stride = 1;
      where.q_stride = where.queries;
      where.k_stride = where.keys;
    }
  }
  CallForm form = cppool::kernels::table::FormOf(
      std::string(words[0]) == "backward", request,
      {where, std::string(words[5]) == "br" ? CPPOOL_BOTTOM_RIGHT : CPPOOL_TOP_LEFT}, {0, 4, 0, 2}, 1, 1,
      {false, true, true});
  form.window_left = std::atoi(words[6]);
  form.window_right = std::atoi(words[7]);
  return strided ? Strided(form) : form;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc < 11) return 2;
  void* module = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  const auto entry =
      module ? reinterpret_cast<cppool_attention_entry>(dlsym(module, "cppool_attention")) : nullptr;
  if (!entry) {
    std::printf("%s\n", dlerror());
    return 1;
  }
  const cppool_attention_kernel& kernel = **entry();
  if (argc == 2) {
    std::printf("%s\n", kernel.version);
    return 0;
  }
  const CallForm form = FormOf(argv + 3, {argv + 11, argv + argc});
  const cppool::kernels::table::CallView view(form, 0);
  std::array<char, 512> why{};
  void* plan = nullptr;
  std::size_t workspace_bytes = 0;
  const cppool_status status =
      std::string(argv[2]) == "prepare"
          ? kernel.prepare(view.call(), &plan, &workspace_bytes, why.data(), why.size())
          : kernel.supports(view.call(), why.data(), why.size());
  if (status == CPPOOL_OK) {
    std::printf("ok\n");
  } else {
    std::printf("status %d: %s\n", static_cast<int>(status), why.data());
  }
  return 0;
}

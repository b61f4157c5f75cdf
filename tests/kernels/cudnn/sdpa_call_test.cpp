// A call of cppool/attention.h in cuDNN's terms. Host only, without cuDNN.
#include "kernels/cudnn/sdpa_call.h"

#include <algorithm>
#include <optional>
#include <string>

#include "kernels/attention/families/table/call.h"
#include "kernels/cudnn/library.h"
#include "tests/catch.h"
#include "tests/environment.h"
#include "tests/files.h"

namespace cppool::kernels::cudnn {
namespace {

using Catch::Matchers::ContainsSubstring;
using Form = std::array<std::int64_t, 4>;

// 2 sequences of 5 queries and 7 keys, 6 heads of 16 for queries and 3 for keys, values of 8; sbhd.
table::CallForm Call(bool backward, Dtype dtype = Dtype::kBf16, KernelRequest request = KernelRequest()) {
  request.shape.dtypes = TensorDtypes(dtype);
  request.shape.dim_qk = 16;
  request.shape.dim_v = 8;
  request.shape.heads = 6;
  request.shape.kv_heads = 3;
  request.shape.group = 2;
  request.shape.scale = 0.25f;
  table::Rectangle where;
  where.queries = 5;
  where.keys = 7;
  where.batch = 2;
  where.q_stride = where.k_stride = where.sequence_stride = 1;
  return table::FormOf(backward, request, {where, CPPOOL_TOP_LEFT}, {0, 6, 0, 3}, 2, 2, {false, true, true});
}

// With a bias [batch or 1, heads or 1, queries or 1, keys], which is a part of one with 10 queries and 11
// keys.
table::CallForm CallWithBias(bool backward, bool batch, bool heads, bool queries) {
  KernelRequest request;
  request.bias = BiasType::kPostScale;
  BiasExtent& bias = request.bias_extent;
  bias.keys = 11;
  bias.queries = 10;
  bias.query_stride = queries ? 11 : 0;
  bias.head_stride = heads ? 110 : 0;
  bias.batch_stride = batch ? 660 : 0;
  return Call(backward, Dtype::kBf16, request);
}

std::optional<std::string> Read(const table::CallForm& form, SdpaCall& to) {
  return ReadCall(*table::CallView(form, 0).call(), to);
}

SdpaCall Read(const table::CallForm& form) {
  SdpaCall call;
  CHECK(Read(form, call) == std::nullopt);
  return call;
}

std::string Refusal(const table::CallForm& form) {
  SdpaCall call;
  return Read(form, call).value_or("");
}

}  // namespace

TEST_CASE("cuDNN's call in fp8 has payloads, its result among them") {
  KernelRequest request;
  request.fp8 = {ScalingMode::kCurrent, true, false, true, true};
  const SdpaCall plain = Read(Call(false)), call = Read(Call(false, Dtype::kBf16, request));
  CHECK(call.fp8);
  CHECK_FALSE(plain.fp8);
  CHECK(call.type == ElementType::kBf16);
  CHECK(call.q == plain.q);
  CHECK(call.out == plain.out);
  CHECK_THAT(Refusal(Call(true, Dtype::kBf16, request)), ContainsSubstring("delta is given"));
  request.fp8->bwd = false;
  CHECK_FALSE(Read(Call(true, Dtype::kBf16, request)).fp8);
  table::CallForm broken = Call(false, Dtype::kBf16, request);
  broken.tensors[table::kKScale].ndim = 0;
  CHECK(Refusal(broken) == "it needs k in e4m3 with a scale");
}

TEST_CASE("cuDNN's tensors have their heads before their tokens") {
  const SdpaCall call = Read(Call(true));
  CHECK(call.q == TensorForm{{2, 6, 5, 16}, {96, 16, 192, 1}});
  CHECK(call.k == TensorForm{{2, 3, 7, 16}, {48, 16, 96, 1}});
  CHECK(call.v == TensorForm{{2, 3, 7, 8}, {24, 8, 48, 1}});
  CHECK(call.out == TensorForm{{2, 6, 5, 8}, {48, 8, 96, 1}});
  CHECK(call.stats == TensorForm{{2, 6, 5, 1}, {30, 5, 1, 1}});
  CHECK(call.dout == call.out);
  CHECK(call.dq == call.q);
  CHECK(call.dk == call.k);
  CHECK(call.dv == call.v);
  CHECK(call.backward);
  CHECK(call.type == ElementType::kBf16);
  CHECK(call.scale == 0.25);
  CHECK(Read(Call(false)).dq == TensorForm{});
  CHECK_FALSE(Read(Call(false)).backward);
  CHECK(Read(Call(false, Dtype::kFp16)).type == ElementType::kFp16);
}

TEST_CASE("cuDNN's bounds: the left one counts the diagonal") {
  table::CallForm form = Call(false);
  CHECK(Read(form).left_bound == std::nullopt);
  CHECK(Read(form).right_bound == std::nullopt);
  CHECK_FALSE(Read(form).bottom_right);
  form.window_right = 0;
  CHECK(Read(form).left_bound == std::nullopt);
  CHECK(Read(form).right_bound == 0);
  form.window_left = 0;
  form.window_right = 3;
  form.anchor = CPPOOL_BOTTOM_RIGHT;
  CHECK(Read(form).left_bound == 1);
  CHECK(Read(form).right_bound == 3);
  CHECK(Read(form).bottom_right);
}

TEST_CASE("calls with other masks, passes or determinism are not the same") {
  const SdpaCall call = Read(Call(true));
  CHECK(call == Read(Call(true)));
  CHECK_FALSE(call == Read(Call(false)));
  table::CallForm other = Call(true);
  other.deterministic = true;
  CHECK_FALSE(call == Read(other));
  other = Call(true);
  other.window_right = 0;
  CHECK_FALSE(call == Read(other));
  other = Call(true);
  other.tensors[table::kK].strides[0] *= 2;
  CHECK_FALSE(call == Read(other));
}

TEST_CASE("cuDNN's bias: what is broadcast has a stride as if it were packed") {
  const SdpaCall whole = Read(CallWithBias(true, true, true, true));
  CHECK(whole.bias == TensorForm{{2, 6, 5, 7}, {660, 110, 11, 1}});
  CHECK(whole.dbias == TensorForm{{2, 6, 5, 7}, {210, 35, 7, 1}});
  const SdpaCall heads = Read(CallWithBias(true, false, true, true));
  CHECK(heads.bias == TensorForm{{1, 6, 5, 7}, {660, 110, 11, 1}});
  CHECK(heads.dbias == TensorForm{{1, 6, 5, 7}, {210, 35, 7, 1}});
  const SdpaCall shared = Read(CallWithBias(false, false, false, false));
  CHECK(shared.bias == TensorForm{{1, 1, 1, 7}, {7, 7, 7, 1}});
  CHECK(shared.dbias == TensorForm{});
  CHECK(Read(Call(true)).bias == TensorForm{});
  CHECK_THAT(Refusal(CallWithBias(true, false, false, false)), ContainsSubstring("all queries share"));
  CHECK_THAT(Refusal(Strided(CallWithBias(true, false, true, true))), ContainsSubstring("packed dbias"));
  CHECK(Refusal(Strided(CallWithBias(false, false, true, true))) == "");
  table::CallForm other = CallWithBias(true, true, true, true);
  other.tensors[table::kDbias].ndim = 0;
  CHECK_THAT(Refusal(other), ContainsSubstring("dbias"));
  other = CallWithBias(true, true, true, true);
  other.tensors[table::kBias].dtype = Dtype::kFp32;
  CHECK_THAT(Refusal(other), ContainsSubstring("bias is fp32"));
  CHECK_FALSE(whole == heads);
}

TEST_CASE("cuDNN's ALiBi and largest logits") {
  KernelRequest request;
  request.bias = BiasType::kAlibi;
  request.max_logit = true;
  const table::CallForm form = Call(false, Dtype::kBf16, request);
  SdpaCall call = Read(form);
  CHECK(call.alibi);
  CHECK(call.alibi_diagonal == 0);
  CHECK(call.max_logit);
  table::CallForm other = form;
  other.alibi_diagonal = -3;
  CHECK(Read(other).alibi_diagonal == -3);
  CHECK_FALSE(Read(other) == call);
  other = form;
  other.tensors[table::kMaxLogit].strides[1] *= 2;
  CHECK_THAT(Refusal(other), ContainsSubstring("max_logit in the form of lse"));
  other = form;
  other.tensors[table::kAlibiSlopes].strides[0] = 2;
  CHECK_THAT(Refusal(other), ContainsSubstring("alibi_slopes"));
  CHECK_FALSE(Read(Call(false)).alibi);
  CHECK_FALSE(Read(Call(false)).max_logit);
  CHECK_FALSE(Read(Call(true, Dtype::kBf16, request)).max_logit);
  CHECK(Read(Call(true, Dtype::kBf16, request)).alibi);
}

TEST_CASE("calls that are not for cuDNN's 16-bit attention are refused in words") {
  CHECK_THAT(Refusal(Call(false, Dtype::kFp32)), ContainsSubstring("q is fp32"));
  table::CallForm form = Call(false);
  form.tensors[table::kOut].dtype = Dtype::kFp32;
  CHECK_THAT(Refusal(form), ContainsSubstring("out is fp32"));
  form = Call(true);
  form.tensors[table::kDq].dtype = Dtype::kFp32;
  CHECK_THAT(Refusal(form), ContainsSubstring("dq is fp32"));
  form = Call(true);
  form.tensors[table::kDk].dtype = Dtype::kFp16;
  CHECK_THAT(Refusal(form), ContainsSubstring("q is bf16 but dk is fp16"));
  form = Call(true);
  form.tensors[table::kDout].ndim = 0;
  CHECK_THAT(Refusal(form), ContainsSubstring("dout"));
  form = Call(false);
  form.tensors[table::kLse].ndim = 0;
  CHECK_THAT(Refusal(form), ContainsSubstring("lse"));
  SdpaCall call;
  const table::CallForm whole = Call(false);
  const table::CallView view(whole, 0);
  cppool_attention_call older = *view.call();
  older.struct_size -= 8;
  CHECK_THAT(ReadCall(older, call).value_or(""), ContainsSubstring("older"));
}

TEST_CASE("libraries are found in the folders that python3 names") {
  cppool::test::TemporaryFolder folder;
  {
    const cppool::test::Environment mine("PYTHONPATH", folder.path().string());
    const std::vector<std::string> folders = PythonFolders();  // of the real python3
    CHECK(std::count(folders.begin(), folders.end(), folder.path().string()) == 1);
  }
  const auto packages = folder / "packages";
  std::filesystem::create_directories(folder / "bin");
  const std::string script = folder.File("bin/python3");
  std::ofstream(script) << "#!/bin/sh\necho " << folder.File("nothing") << "\necho " << packages.string()
                        << "\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  const cppool::test::Environment path("PATH", folder.File("bin"));
  CHECK(PythonFolders() == std::vector<std::string>{folder.File("nothing"), packages.string()});

  // A version that the machine does not have.
  const OpenedLibrary missing = OpenCudaRuntime(99);
  CHECK(missing.handle == nullptr);
  CHECK_THAT(missing.failure, ContainsSubstring("libcudart.so.99") && ContainsSubstring(packages.string()) &&
                                  ContainsSubstring("LD_LIBRARY_PATH"));
  std::filesystem::create_directories(packages / "nvidia/cu99/lib");
  const auto library = packages / "nvidia/cu99/lib/libcudart.so.99";
  std::ofstream(library) << "no library";
  CHECK_THAT(OpenCudaRuntime(99).failure, ContainsSubstring("file too short"));
  std::filesystem::remove(library);
  std::filesystem::copy_file(CPPOOL_ANY_LIBRARY, library);
  CHECK(OpenCudaRuntime(99).handle != nullptr);

  std::ofstream(script) << "#!/bin/sh\nexit 1\n";
  CHECK(PythonFolders().empty());
  std::filesystem::remove(script);
  CHECK(PythonFolders().empty());
}

}  // namespace cppool::kernels::cudnn

// With which sanitizer the tests are built. Its functions are in stacks, and it ends crashes itself.
// ThreadSanitizer does not support threads after a fork; UBSan, which is built with AddressSanitizer, needs
// free descriptors to check a virtual table.
#pragma once

#if defined(__SANITIZE_THREAD__)  // GCC
#define CPPOOL_TEST_TSAN 1
#elif defined(__SANITIZE_ADDRESS__)
#define CPPOOL_TEST_ASAN 1
#elif defined(__has_feature)  // clang
#if __has_feature(thread_sanitizer)
#define CPPOOL_TEST_TSAN 1
#elif __has_feature(address_sanitizer)
#define CPPOOL_TEST_ASAN 1
#endif
#endif

namespace cppool::test {

#if defined(CPPOOL_TEST_TSAN) || defined(CPPOOL_TEST_ASAN)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace cppool::test

/* The C interface, compiled as C99 and used from C alone, with a fake daemon, and with a real one, whose
 * runs can be cancelled: c_client_test FAKE_DAEMON DAEMON. */
#define _POSIX_C_SOURCE 200809L
#include <cppool/client.h>
#include <cppool/version.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failed = 0;

static void Check(int holds, const char* what, const char* text) {
  if (holds) return;
  fprintf(stderr, "does not hold: %s; the text: %s\n", what, text ? text : "(null)");
  failed = 1;
}

/* Whether the text has this part; of none: whether there is no text. */
static int Says(const char* text, const char* part) {
  return part == NULL || text == NULL ? part == text : strstr(text, part) != NULL;
}

/* Calls once, checks the status and that the text has `part`, and frees the text. */
#define EXPECT(status, part, call)                        \
  do {                                                    \
    char* out = NULL;                                     \
    const cppool_client_status got = (call);              \
    Check(got == (status), #call " gives " #status, out); \
    Check(Says(out, (part)), #call " says " #part, out);  \
    cppool_client_free(out);                              \
  } while (0)

typedef struct lines {
  size_t count;
  char last[256];
} lines;

static void Keep(void* context, const char* line, size_t size) {
  lines* const all = context;
  ++all->count;
  snprintf(all->last, sizeof all->last, "%.*s", (int)size, line);
}

/* A lock of the caller's: 1 while it is held. */
static int held = 1, times_left = 0, asked = 0;
static void* LeaveLock(void) {
  Check(held == 1, "the lock is held when it is given up", "");
  held = 0;
  ++times_left;
  return &held;
}
static void EnterLock(void* left) {
  Check(left == &held && held == 0, "what leave returned comes back", "");
  held = 1;
}
static int Interrupted(void) {
  Check(held == 1, "the lock is held when interrupted is asked", "");
  return ++asked >= 3;
}

/* On a thread beside the call of the run: cancels it once it has begun iterations. */
static void* CancelWhenBegun(void* pool) {
  int begun = 0;
  while (!begun) {
    char* out = NULL;
    const cppool_client_status got = cppool_pool_status(pool, &out);
    Check(got == CPPOOL_CLIENT_OK, "status is answered during a run", out);
    begun = got != CPPOOL_CLIENT_OK || (Says(out, "\"iteration\":") && !Says(out, "\"iteration\":0,"));
    if (begun) Check(Says(out, "\"ranks\":[{"), "status says where the ranks are", out);
    cppool_client_free(out);
  }
  EXPECT(CPPOOL_CLIENT_OK, "{\"cancelled\":true}", cppool_pool_cancel(pool, &out));
  return NULL;
}

static void TestCancel(const char* daemon) {
  char options[4096];
  cppool_pool* pool = NULL;
  pthread_t thread;
  snprintf(options, sizeof options, "{\"world_size\": 2, \"daemon\": \"%s\", \"backend\": \"host\"}", daemon);
  EXPECT(CPPOOL_CLIENT_OK, NULL, cppool_pool_create(options, NULL, &pool, &out));
  EXPECT(CPPOOL_CLIENT_OK, "\"text\":\"nothing runs\"", cppool_pool_status(pool, &out));
  EXPECT(CPPOOL_CLIENT_OK, "{\"cancelled\":false}", cppool_pool_cancel(pool, &out));
  Check(pthread_create(&thread, NULL, CancelWhenBegun, pool) == 0, "a thread starts", NULL);
  EXPECT(CPPOOL_CLIENT_OK, "\"kind\":\"cancelled\"",
         cppool_pool_ask(pool,
                         "{\"op\": \"run\", \"repeat\": 10000, \"params\": {\"max_seqlen_q\": 64, "
                         "\"num_heads\": 4}}",
                         &out));
  pthread_join(thread, NULL);
  EXPECT(CPPOOL_CLIENT_OK, "\"errors\":1",
         cppool_pool_ask(pool, "{\"op\": \"stats\"}", &out)); /* it is warm */
  EXPECT(CPPOOL_CLIENT_OK, "there is no such file",
         cppool_pool_ask(pool, "{\"op\": \"list\", \"load\": \"/nowhere.so\"}", &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "no pool", cppool_pool_cancel(NULL, &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "no pool", cppool_pool_status(NULL, &out));
  cppool_pool_free(pool);
}

int main(int argc, char** argv) {
  static const char marker[] = "client_c_test.marker"; /* in the daemon's folder, which is this one's */
  char options[4096];
  char* tail;
  cppool_pool* pool = NULL;
  lines all = {0, ""};
  cppool_pool_hooks hooks;
  if (argc != 3) return 2;
  memset(&hooks, 0, sizeof hooks);
  hooks.struct_size = sizeof hooks;
  hooks.context = &all;
  hooks.log = Keep;
  hooks.leave = LeaveLock;
  hooks.enter = EnterLock;
  hooks.interrupted = Interrupted;
  snprintf(
      options, sizeof options,
      "{\"world_size\": 2, \"daemon\": \"%s\", \"grace_ms\": 200, \"kill_grace_ms\": 300, \"retries\": 1}",
      argv[1]);

  Check(strcmp(cppool_client_version(), CPPOOL_VERSION) == 0, "the version of the header",
        cppool_client_version());
  EXPECT(CPPOOL_CLIENT_INVALID, "did you mean \\\"world_size\\\"",
         cppool_pool_create("{\"world_sise\": 2}", NULL, &pool, &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "from 1 to 64", cppool_pool_create("{\"world_size\": 0}", NULL, &pool, &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "not JSON", cppool_pool_create("{", NULL, &pool, &out));
  hooks.struct_size = sizeof hooks - 1;
  EXPECT(CPPOOL_CLIENT_INVALID, "struct_size", cppool_pool_create(options, &hooks, &pool, &out));
  hooks.struct_size = sizeof hooks;
  Check(pool == NULL, "no pool after an error", "");
  EXPECT(CPPOOL_CLIENT_OK, NULL, cppool_pool_create(options, &hooks, &pool, &out));

  EXPECT(CPPOOL_CLIENT_OK, "\"world_size\":2", cppool_pool_ask(pool, "{\"op\": \"hello\"}", &out));
  EXPECT(CPPOOL_CLIENT_OK, "\"status\":\"passed\"",
         cppool_pool_ask(pool, "{\"op\": \"run\", \"params\": {\"do\": \"pass\"}}", &out));
  EXPECT(CPPOOL_CLIENT_OK, "because of mismatch",
         cppool_pool_ask(pool, "{\"op\": \"run\", \"params\": {\"do\": \"fail\"}}", &out));
  Check(held == 1 && times_left >= 3, "every call gives the lock up and takes it again", "");
  EXPECT(CPPOOL_CLIENT_INVALID, "unknown op", cppool_pool_ask(pool, "{\"op\": \"hallo\"}", &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "cppool_pool_stop", cppool_pool_ask(pool, "{\"op\": \"shutdown\"}", &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "\\\"id\\\"", cppool_pool_ask(pool, "{\"op\": \"hello\", \"id\": 1}", &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "no request", cppool_pool_ask(pool, NULL, &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "no pool", cppool_pool_ask(NULL, "{\"op\": \"hello\"}", &out));

  EXPECT(CPPOOL_CLIENT_INVALID, "is no source",
         cppool_pool_compile(pool, "{\"source\": \"mine.txt\"}", &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "\\\"source\\\" is missing", cppool_pool_compile(pool, NULL, &out));

  EXPECT(CPPOOL_CLIENT_NO_ANSWER, "\"kind\":\"died\"",
         cppool_pool_ask(pool, "{\"op\": \"run\", \"params\": {\"do\": \"die\"}}", &out));
  Check(strstr(all.last, "is sent to a new daemon") != NULL, "the log has the retry", all.last);
  tail = cppool_pool_stderr_tail(pool);
  Check(tail != NULL && strstr(tail, "the last words") != NULL, "the tail of stderr", tail);
  cppool_client_free(tail);

  remove(marker);
  EXPECT(CPPOOL_CLIENT_OK, "\"flaky\":\"flaky (passed at attempt 2)\",\"lost\":[{\"crash\":{\"case\":null,",
         cppool_pool_ask(
             pool,
             "{\"op\": \"run\", \"params\": {\"do\": \"crash_once\", \"marker\": \"client_c_test.marker\"}}",
             &out));
  remove(marker);

  asked = 0;
  EXPECT(CPPOOL_CLIENT_INTERRUPTED, "\"kind\":\"interrupted\"",
         cppool_pool_ask(pool, "{\"op\": \"run\", \"params\": {\"do\": \"hang\"}}", &out));
  Check(asked == 3 && held == 1, "interrupted at the third time", "");
  asked = -1000;
  EXPECT(
      CPPOOL_CLIENT_NO_ANSWER, "\"diagnosis\":\"in its last",
      cppool_pool_ask(pool, "{\"op\": \"run\", \"params\": {\"do\": \"hang\"}, \"deadline_ms\": 300}", &out));
  EXPECT(CPPOOL_CLIENT_OK, "passed",
         cppool_pool_ask(pool, "{\"op\": \"run\", \"params\": {\"do\": \"pass\"}}", &out));

  EXPECT(CPPOOL_CLIENT_OK, "cppool run --world-size 4 --backend host --deadline 1.5 --param seed=7",
         cppool_client_command("{\"world_size\": 4, \"backend\": \"host\"}",
                               "{\"op\": \"run\", \"params\": {\"seed\": 7}, \"deadline_ms\": 1500}", &out));
  EXPECT(CPPOOL_CLIENT_OK, "| cppoold --world-size 2 --sentinel ''",
         cppool_client_command(NULL, "{\"op\": \"run\", \"kwargs\": {\"dtype\": \"bf16\"}}", &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "only a run", cppool_client_command(NULL, "{\"op\": \"hello\"}", &out));
  EXPECT(CPPOOL_CLIENT_OK, "skipped: no\\nrepeat: sh\"",
         cppool_client_describe("{\"answer\": {\"ok\": false, \"status\": \"skipped\", \"error\": \"no\","
                                "\"failure\": {\"kind\": \"unsupported\", \"rank\": null, \"stage\": null, "
                                "\"detail\": \"\"}}, \"command\": \"sh\"}",
                                &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "an object with", cppool_client_describe("[]", &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "a result is what",
         cppool_client_describe("{\"answer\": {\"ok\": true, \"runs\": true}, \"lost\": [1]}", &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "status", cppool_client_describe("{\"answer\": {}}", &out));
  EXPECT(CPPOOL_CLIENT_OK, "mha_128 fp16 bshd p2p W=2", cppool_client_suite("{\"suite\": \"smoke\"}", &out));
  EXPECT(CPPOOL_CLIENT_INVALID, "did you mean \\\"smoke\\\"",
         cppool_client_suite("{\"suite\": \"smok\"}", &out));
  EXPECT(CPPOOL_CLIENT_OK, argv[1], cppool_client_find_daemon(options, &out));

  cppool_pool_stop(pool);
  cppool_pool_free(pool);
  TestCancel(argv[2]);
  cppool_pool_free(NULL);
  cppool_client_free(NULL);
  return failed;
}

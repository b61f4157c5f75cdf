// A shared library that has no cases.
extern "C" int cppool_has_no_cases() { return 1; }

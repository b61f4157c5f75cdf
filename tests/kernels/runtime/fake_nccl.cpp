// A library that is there when the module is linked and gone when it is opened.
extern "C" int CppoolTestOfNccl() { return 2; }

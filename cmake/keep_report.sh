#!/bin/sh
# keep_report.sh FILE COMMAND...: runs a compiler and keeps in FILE what it and the assembler say; of this, what the assembler says of
# kernels (-Xptxas -v) is not printed.
file=$1
shift
"$@" 2>"$file"
status=$?
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$file" >&2
exit $status

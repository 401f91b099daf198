#!/bin/sh
# keep_log.sh COMPILER ARGUMENT...: runs the compiler and keeps what it says in OBJECT.log, OBJECT being the argument of -o.
log=/dev/null
last=
for argument; do
  if [ "$last" = -o ]; then log=$argument.log; fi
  last=$argument
done
"$@" >"$log" 2>&1
status=$?
cat "$log"
exit $status

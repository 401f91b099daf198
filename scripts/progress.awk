# What scripts/test.sh shows of a step as it runs: a line for each program of tests with its counts, what was skipped, and every
# complaint. On a terminal (-v terminal=1) what is being compiled, too; a log is easier to read without.
/^ *(Compiling|Checking|Documenting|Downloaded) / { if (terminal) print; next }
/^ *(Running|Doc-tests) / {
  name = $0
  sub(/^ *Running (unittests )?/, "", name)
  sub(/^ *Doc-tests /, "documentation of ", name)
  sub(/ \(.*/, "", name)
}
/^test result: / {
  result = $0
  sub(/^test result: /, "", result)
  sub(/ 0 measured; 0 filtered out;/, "", result)
  printf "  %-24s %s\n", name, result
  name = ""
  next
}
/^test .* (FAILED|ignored)/ || /^(error|warning)[: [(]/ || /skipped: / || /panicked at/ { print "  " $0 }
{ fflush() }

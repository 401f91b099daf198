# Sourced by the scripts that test what was installed: capi_test.sh, torch_test.sh and python_test.sh.
# They set `logs`, the folder of the checks' logs. scripts/count_tests.awk reads what is printed here.
passed=0 failed=0 ignored=0 started=$SECONDS

# check NAME COMMAND...: runs a command. Shows its output only if it fails.
check() {
  local name=$1 since=$SECONDS log
  log="$logs/${name//[ \/:,]/_}.log"
  shift
  if "$@" >"$log" 2>&1; then
    passed=$((passed + 1))
    echo "test $name ... ok ($((SECONDS - since)) s)"
    return 0
  fi
  failed=$((failed + 1))
  echo "test $name ... FAILED, from $log:"
  tail -n 60 "$log" | sed 's/^/    /'
  return 1
}

# skip NAME WHY: counts as passed, as in the tests that cargo runs. scripts/count_tests.awk takes it out again.
skip() {
  passed=$((passed + 1))
  echo "test $1 ... skipped: $2"
}

# ignore NAME WHY
ignore() {
  ignored=$((ignored + 1))
  echo "test $1 ... ignored, $2"
}

# Prints the result line. Fails if a check did.
result() {
  echo
  echo "test result: $([ $failed = 0 ] && echo ok || echo FAILED). $passed passed; $failed failed; $ignored ignored; 0 measured; 0 filtered out; finished in $((SECONDS - started))s"
  [ $failed = 0 ]
}

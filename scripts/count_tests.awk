# Sums cargo test's result lines: prints "PASSED FAILED SKIPPED". A test that says "skipped: no GPU" has passed in cargo's eyes; here
# it is skipped, as is an ignored one.
/^test result: / {
  for (i = 1; i < NF; i++) {
    if ($(i + 1) ~ /^passed/) passed += $i
    if ($(i + 1) ~ /^failed/) failed += $i
    if ($(i + 1) ~ /^ignored/) ignored += $i
  }
}
/skipped: no GPU/ { gpu++ }
END { print passed - gpu, failed + 0, ignored + gpu }

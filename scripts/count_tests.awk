# Sums cargo test's result lines: prints "PASSED FAILED SKIPPED". A test that says
# "skipped: WHY" has passed in cargo's eyes; here it is skipped, as is an ignored one. (Tests run side by side, so
# that this may stand behind another's "ok", and twice in a line.)
/^test result: / {
  for (i = 1; i < NF; i++) {
    if ($(i + 1) ~ /^passed/) passed += $i
    if ($(i + 1) ~ /^failed/) failed += $i
    if ($(i + 1) ~ /^ignored/) ignored += $i
  }
}
{ skipped += gsub(/(^|[^a-z]|ok)skipped: [^0-9]/, "&") }
END { print passed - skipped, failed + 0, ignored + skipped }

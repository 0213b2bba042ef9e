#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: write_pages.sh ASHLARD ASHLARCTL CHANGELOG SHARE
# Writes the programs' manual pages, their completions and the compressed change log into SHARE.
set -eu
ashlard=$1 ashlarctl=$2 changelog=$3 share=$4

mkdir -p "$share/man/man1" "$share/man/man8" "$share/doc/ashlar" "$share/bash-completion/completions" \
  "$share/zsh/vendor-completions" "$share/fish/vendor_completions.d"

"$ashlarctl" man | gzip -9n >"$share/man/man1/ashlarctl.1.gz"
"$ashlarctl" completion bash >"$share/bash-completion/completions/ashlarctl"
"$ashlarctl" completion zsh >"$share/zsh/vendor-completions/_ashlarctl"
"$ashlarctl" completion fish >"$share/fish/vendor_completions.d/ashlarctl.fish"
gzip -9nc "$changelog" >"$share/doc/ashlar/NEWS.gz"
{
  printf 'ashlar (%s) stable; urgency=medium\n\n  * NEWS.gz says what changed.\n\n' "$("$ashlard" --version | cut -d' ' -f2)"
  printf ' -- Ashlar maintainers <maintainers@users.noreply.a-seed-bb79b9ed.example>  '
  LC_ALL=C date --utc --rfc-email --date="@${SOURCE_DATE_EPOCH:-0}"
} | gzip -9n >"$share/doc/ashlar/changelog.gz"

# The first line of --help says what it is, the indented lines name the options.
{
  printf '.TH ASHLARD 8 "" "%s" "System Administration"\n' "$("$ashlard" --version | sed 's/^ashlard/ashlar/')"
  printf '.SH NAME\nashlard \\- %s\n' "$("$ashlard" --help | sed -n '1{s/^The/the/;s/\.$//;p}')"
  printf '.SH SYNOPSIS\n.B ashlard \\-\\-config\nFILE.yaml [\\-\\-check\\-config]\n.SH OPTIONS\n.nf\n'
  "$ashlard" --help | sed -n -e 's/-/\\-/g' -e 's/^  *//p'
  printf '.fi\n.SH DESCRIPTION\nSIGTERM drains: what memory alone has is written to the disk, at most for drain_seconds.\n'
  printf '.SH EXIT STATUS\n0: it was told to stop. 1: it could not start. 2: arguments or configuration make no sense.\n'
  printf '.SH FILES\n.TP\n.I /etc/ashlar/ashlard.yaml\nThe configuration of the unit. '
  printf '/usr/share/doc/ashlar/ashlard.example.yaml describes every field.\n'
  printf '.SH SEE ALSO\n.BR ashlarctl (1)\n'
} | gzip -9n >"$share/man/man8/ashlard.8.gz"

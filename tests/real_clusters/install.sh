#!/bin/sh
# install.sh FOLDER: unpack SLURM, munge, Open MPI, ip and buildah into FOLDER, from Debian's packages.
#
# They are not installed into the system: there, srun on the PATH would change what every other program on this machine
# sees, beginning with the other tests, and services would start by themselves. What cannot be had is said, and is no
# error: the tests that need it are skipped.
set -u
folder=$1 packages="slurm-wlm munge openmpi-bin iproute2 buildah debootstrap"
done_already=$folder/.installed

[ "$(cat "$done_already" 2>/dev/null)" = "$packages" ] && exit 0
rm -rf "$folder"
mkdir -p "$folder/packages" && cd "$folder/packages" || exit 0

if ! command -v apt-get >/dev/null; then
    echo "Not installed: $packages (no apt-get here: these packages are Debian's)"
    exit 0
fi
[ "$(id -u)" = 0 ] && { timeout 120 apt-get -qq update || echo "apt-get update failed; going on with what it knew"; }
missing=
for package in $packages; do
    # With all that they need and the system has not.
    names=$(apt-get -s --no-install-recommends install "$package" | sed -n 's/^Inst \([^ ]*\) .*/\1/p')
    if [ -n "$names" ]; then
        # shellcheck disable=SC2086  # names are many
        timeout 300 apt-get -qq -o APT::Sandbox::User=root download $names || missing="$missing $package"
    elif ! dpkg -s "$package" >/dev/null 2>&1; then
        missing="$missing $package"
    fi
done
for file in *.deb; do
    [ -e "$file" ] && dpkg -x "$file" "$folder"
done
rm -rf "$folder/packages"

# The plain names, which an installation would have linked.
for file in "$folder"/usr/*bin/*-wlm "$folder"/usr/bin/*.openmpi; do
    [ -e "$file" ] && ln -sf "${file##*/}" "$(echo "$file" | sed 's/-wlm$//; s/\.openmpi$//')"
done
if [ -n "$missing" ]; then
    echo "Not installed:$missing (apt-get could not download them)"
else
    echo "$packages" >"$done_already"
fi
exit 0

#!/usr/bin/env bash
# The simulators aloha, ogbench and metaworld for a GPU machine without network and without GL packages (Python 3.12, NVIDIA driver):
# one folder to carry, about 37 MB.
#   bash tools/sims_bundle.sh .gpu_sims        # with network: makes .gpu_sims/{sims.txz, gl/, env.sh}; keep the folder out of git
#   source .gpu_sims/env.sh                    # there: unpacks once, sets PYTHONPATH, MUJOCO_GL=egl and the GL paths
# What the machine must have itself: numpy, scipy, absl-py, etils, pillow, typing_extensions (jax and pirl bring them).
set -euo pipefail
out=${1:?where to}; mkdir -p "$out"; out=$(cd "$out" && pwd); tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
# Meta-World takes mujoco 3.3.0 alone, and dm_control goes with one version of it.
python3 -m pip download -q --disable-pip-version-check --python-version 3.12 --only-binary=:all: --no-deps -d "$tmp/w" \
  mujoco==3.3.0 dm_control==1.0.28 gym-aloha==0.1.5 ogbench==1.2.2 metaworld==3.1.1 gymnasium==1.4.0 glfw PyOpenGL cloudpickle \
  farama-notifications packaging dm_env dm_tree lxml imageio labmaze pyparsing attrs wrapt ${EXTRA_WHEELS:-}
mkdir "$tmp/s"; for wheel in "$tmp"/w/*.whl; do python3 -m zipfile -e "$wheel" "$tmp/s"; done
cd "$tmp/s"
rm -rf OpenGL/DLLS mujoco/include dm_control/locomotion dm_control/autowrap labmaze/assets
rm -rf dm_control/suite/dog_assets
find . -name '*.dist-info' -prune -exec rm -rf {} +; find dm_control -name '*.skn' -delete
# Half of Meta-World's textures belong to scenes that it no longer has.
grep -rhoE '[A-Za-z0-9_.-]+\.png' --include='*.xml' metaworld/assets | sort -u > "$tmp/used"
find metaworld/assets -name '*.png' | while read -r file; do grep -qxF "$(basename "$file")" "$tmp/used" || rm "$file"; done
tar c . | xz -6 -T0 > "$out/sims.txz"
mkdir -p "$tmp/d" "$out/gl"; cd "$tmp/d"
apt-get download -qq libegl1 libopengl0 libglvnd0 libgl1 libglx0 libgles2 libx11-6 libxcb1 libxau6 libxdmcp6 libbsd0 libmd0 libxext6
for deb in *.deb; do dpkg -x "$deb" x; done; find x -name '*.so*' -exec cp -P {} "$out/gl/" \;
cat > "$out/env.sh" <<'ENV'
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); sims=$here/unpacked
[ -d "$sims/mujoco" ] || { mkdir -p "$sims"; tar xJf "$here/sims.txz" -C "$sims"; }
driver=$(dirname "$(ldconfig -p | sed -n 's/.*libEGL_nvidia.so.0.*=> //p' | head -n 1)")
vendor=$(dirname "$(find / -path /proc -prune -o -name 10_nvidia.json -path '*egl_vendor.d*' -print 2>/dev/null | head -n 1)")
export PYTHONPATH=$sims${PYTHONPATH:+:$PYTHONPATH} MUJOCO_GL=egl __EGL_VENDOR_LIBRARY_DIRS=$vendor
export LD_LIBRARY_PATH=$here/gl:$driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
ENV
du -sh "$out"

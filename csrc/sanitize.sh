#!/bin/sh
# Run the extension's own tests with AddressSanitizer and UndefinedBehaviorSanitizer, by hand:
#   sh csrc/sanitize.sh [python]
# The stack is left out: greenlet copies slices of it with memcpy, and the marks that the
# sanitizer puts between variables would be reported there.
set -eu
python=${1:-python}
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/g++-sanitized" <<END
#!/bin/sh
exec g++ "\$@" -g -O1 -fsanitize=address,undefined -fno-sanitize=vptr \
    -fno-sanitize-recover=undefined -fno-omit-frame-pointer --param asan-stack=0
END
chmod +x "$folder/g++-sanitized"
export CXX="$folder/g++-sanitized" NNSIGHT_PP_CACHE="$folder/cache" PYTHONPATH=.
# Built without the preload: the compiler would be slowed down, too.
"$python" -c "
from nnsight_pp.interleave import extension
print(extension.build(extension._cache_folder()))"
nm -D "$folder"/cache/*/*.so | grep -q __asan || { echo "not sanitized" >&2; exit 1; }
ASAN_OPTIONS=detect_leaks=0,detect_stack_use_after_return=0 \
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
    PYTHONMALLOC=malloc \
    "$python" -m pytest -q -p no:cacheprovider tests/unit/interleave/test_thread_state.py tests/unit/interleave/test_nearby.py tests/harness/test_lane.py

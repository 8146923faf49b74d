#!/usr/bin/env bash
# Run one tier of the tests: run_tier.sh NAME "FOLDER ..." [pytest arguments].
# A tier whose folders hold no test is named as such, it is not a failure.
set -euo pipefail

tier=$1
read -ra wanted <<< "$2"
shift 2

folders=()
for folder in "${wanted[@]}"; do
    if [[ -n $(find "$folder" -name 'test_*.py' -print -quit 2>/dev/null) ]]; then
        folders+=("$folder")
    fi
done
if (( ${#folders[@]} == 0 )); then
    echo "== $tier: no tests yet"
    exit 0
fi

extra=()
if [[ $tier == unit ]]; then
    # The examples in docstrings are tests of the cheapest tier.
    extra=(--doctest-modules nnsight_pp --ignore=nnsight_pp/engines/vllm)
fi

echo "== $tier: ${folders[*]}"
exec pytest "${folders[@]}" "${extra[@]}" --durations=10 --durations-min=0.05 "$@"

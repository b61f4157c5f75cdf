# bash completion for cppool and cppoold: commands, options and the values of options, from what `--help` says; else files.
_cppool() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} help words=
  local -a command=("$1")
  [[ ${1##*/} != cppool || $COMP_CWORD == 1 ]] || command+=("${COMP_WORDS[1]}")
  help=$("${command[@]}" --help 2>/dev/null) || return
  case $before,$word in
    *,-*) words=$(grep -oE -- '^ +(-h,)?--[a-z-]+' <<<"$help" | sed 's/ *\(-h,\)\?//') ;;
    --*) words=$(sed -n "s/^ *$before [^ ]*{\([^}]*\)}.*/\1/p" <<<"$help" | tr , ' ') ;;
    *) ((COMP_CWORD > 1)) || words=$(sed -n '/^Subcommands:/,$s/^  \([a-z]*\) .*/\1/p' <<<"$help") ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
complete -o default -F _cppool cppool cppoold

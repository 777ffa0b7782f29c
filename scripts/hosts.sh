#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Several "hosts" on one machine: network namespaces with a name of their own, on one switch, over links of a given
# rate. MPI takes them for machines: shared memory inside each, TCP between them. As in a cluster, mpirun's own daemons
# talk over a second network, of no given rate, which is neither counted nor cut.
#
#   hosts.sh up N RATE                             N hosts; RATE as tc writes it (1gbit), or none
#   hosts.sh mpirun N PER_HOST [OPTION... --] PROGRAM ARG...
#                                                  on the first N hosts, PER_HOST processes each
#   hosts.sh exec I COMMAND ARG...                 on host I, from 0
#   hosts.sh bytes I                               bytes that host I has sent over its link
#   hosts.sh cut I, hosts.sh join I                takes the link of host I down, and up again
#   hosts.sh down
#
# TREEATTN_HOSTS: prefix of the names (default: tahost). Two sets of hosts with different prefixes do not meet.
# Exit status 77: no namespaces can be made here.
set -euo pipefail
prefix=${TREEATTN_HOSTS:-tahost}
switch=$prefix-switch
self=$(readlink -f "${BASH_SOURCE[0]}")

fail() { echo "hosts.sh: $1" >&2; exit "${2:-2}"; }
skip() { fail "*** SKIPPED: $1 ***" 77; }
usage() { sed -n '7,14s/^#   //p' "$self" >&2; exit 2; }
number() { [[ $2 =~ ^[0-9]+$ ]] || fail "$1 is \"$2\"; accepted: a whole number"; }

spaces() { ip netns list | awk '{print $1}' | grep -E "^$prefix-([0-9]+|switch)\$" || true; }

# Processes still inside keep a namespace alive, so they go first, with any that they start meanwhile. What they leave
# behind bears the name of the host. An interrupt that has led here does not end it half way.
down() {
  local space pids i status=0
  trap '' INT TERM HUP
  for space in $(spaces); do
    for ((i = 0; i < 50; i++)); do
      pids=$(ip netns pids "$space" 2>/dev/null) || true
      [ -n "$pids" ] || break
      xargs kill -9 <<<"$pids" 2>/dev/null || true
      sleep 0.02
    done
    ip netns del "$space" || status=1
  done
  rm -rf "${TMPDIR:-/tmp}/ompi.$prefix-"* "/dev/shm/vader_segment.$prefix-"*
  return $status
}

# shape SPACE DEVICE: what leaves through the device.
shape() {
  [ "$rate" = none ] || ip netns exec "$1" tc qdisc add dev "$2" root tbf rate "$rate" burst 128kb latency 20ms
}

up() {
  local count=$1 rate=$2 i net host
  number N "$count"
  if [ "$count" -lt 1 ] || [ "$count" -gt 200 ]; then fail "N is $count; accepted: 1 to 200"; fi
  [ "$(id -u)" -eq 0 ] || skip "hosts need root"
  for tool in ip tc unshare; do
    command -v $tool >/dev/null || skip "hosts need $tool (Debian: iproute2, util-linux)"
  done
  [ -z "$(spaces)" ] || fail "hosts \"$prefix\" are up already; hosts.sh down takes them away"
  trap down EXIT  # until all of them stand
  ip netns add "$switch" 2>/dev/null || skip "no network namespace can be made here"
  for net in 0 1; do
    ip -n "$switch" link add br$net type bridge || skip "no bridge can be made in a namespace"
    ip -n "$switch" link set br$net up
  done
  for ((i = 0; i < count; i++)); do
    host=$prefix-$i
    ip netns add "$host"
    ip -n "$host" link set lo up
    for net in 0 1; do
      ip link add eth$net netns "$host" type veth peer name port$i-$net netns "$switch"
      ip -n "$switch" link set port$i-$net master br$net up
      ip -n "$host" addr add 10.77.$net.$((i + 1))/24 dev eth$net
      ip -n "$host" link set eth$net up
    done
    shape "$host" eth0        # what it sends
    shape "$switch" port$i-0  # what it gets
  done
  trap - EXIT
}

# shellcheck disable=SC2016  # the inner shell expands it
# Becomes a program in the namespace, under the name of the host: MPI tells hosts apart by that.
enter() {
  local host=$1
  shift
  exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$host" "$@"
}

# Where there are more processes than cores they are dealt out over the cores: left to itself, the scheduler stacks them,
# and MPI would bind the first process of every host to the same core. (Not where only some cores may be used: which?)
#
# A link is to carry data both ways at once. Open MPI sends "put me the rest" down the same connection as its data; where
# both sides have something to send, one waits behind all that the other has in its socket, and the two take turns. So:
# no puts, and a socket that holds little.
launch() {
  local count=$1 per_host=$2 hosts="" options=() i
  number N "$count"
  number PER_HOST "$per_host"
  shift 2
  for ((i = 0; i < $#; i++)); do
    [ "${*:i+1:1}" = -- ] || continue
    options=("${@:1:i}")
    shift $((i + 1))
    break
  done
  [ $# -gt 0 ] || usage
  command -v mpirun >/dev/null || skip "no mpirun (Debian: openmpi-bin)"
  for ((i = 0; i < count; i++)); do
    spaces | grep -qx "$prefix-$i" || fail "host $i is not up; accepted: N as in hosts.sh up"
    hosts+=${hosts:+,}$prefix-$i:$per_host
  done
  local deal=()
  if [ $((count * per_host)) -gt "$(nproc)" ] && [ "$(nproc)" -eq "$(nproc --all)" ]; then
    # shellcheck disable=SC2016  # the inner shell expands it
    deal=(sh -c 'exec taskset -c $((OMPI_COMM_WORLD_RANK % $0)) "$@"' "$(nproc)")
  fi
  enter "$prefix-0" env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun \
    --mca plm rsh --mca plm_rsh_agent "$self agent" --mca plm_rsh_no_tree_spawn 1 \
    --mca oob_tcp_if_include eth1 --mca btl_tcp_if_include eth0 --mca btl self,vader,tcp --mca pml ob1 \
    --mca btl_tcp_flags send,inplace --mca btl_tcp_sndbuf 131072 --mca mpi_yield_when_idle 1 \
    --host "$hosts" --map-by "ppr:$per_host:node" --bind-to none "${options[@]}" "${deal[@]}" "$@"
}

host_name() {
  number I "$1"
  spaces | grep -qx "$prefix-$1" || fail "host $1 is not up; accepted: 0 to N - 1 of hosts.sh up"
  echo "$prefix-$1"
}

[[ $prefix =~ ^[A-Za-z0-9]{1,40}$ ]] || fail "TREEATTN_HOSTS is \"$prefix\"; accepted: up to 40 letters and digits"
command=${1:-}
[ $# -eq 0 ] || shift
case $command/$# in
  up/2) up "$@" ;;
  down/0) down ;;
  mpirun/[0-2]) usage ;;
  mpirun/*) launch "$@" ;;
  exec/[0-1]) usage ;;
  exec/*) host=$(host_name "$1") && shift && enter "$host" "$@" ;;
  bytes/1) host=$(host_name "$1") && ip netns exec "$host" cat /sys/class/net/eth0/statistics/tx_bytes ;;
  cut/1) host=$(host_name "$1") && ip -n "$switch" link set "port$1-0" down ;;
  join/1) host=$(host_name "$1") && ip -n "$switch" link set "port$1-0" up ;;
  agent/*)  # mpirun's remote shell: the host, then a command line for a shell
    host=$1
    shift
    enter "$host" sh -c "$*"
    ;;
  *) usage ;;
esac

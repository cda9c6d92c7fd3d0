#!/bin/bash
# Run a command beside real daemons of Slurm, in a network of its own: unshare -n slurm.sh ROOT WORK COMMAND...
#
# ROOT holds Debian's packages, unpacked:
#   apt-get download slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15
#   for package in *.deb; do dpkg -x $package ROOT; done
# WORK is an empty folder for all that the daemons write. They end with the command.
set -e
root=$1 work=$2 host=$(hostname)
shift 2
ip link set lo up
ip addr add 10.9.9.9/32 dev lo # Slurm asks for addresses that are not of the loopback
libraries=$root/usr/lib/x86_64-linux-gnu
export PATH=$root/usr/bin:$root/usr/sbin:$PATH SLURM_CONF=$work/slurm.conf
export LD_LIBRARY_PATH=$libraries:$libraries/slurm-wlm
mkdir "$work/state" "$work/spool"
cat >"$work/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(10.9.9.9)
AuthInfo=socket=$work/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
PluginDir=$libraries/slurm-wlm
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_res
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=10.9.9.9 CPUs=64 RealMemory=65536
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
head -c 1024 /dev/urandom >"$work/munge.key"
chmod 600 "$work/munge.key"
munged --foreground --force --socket="$work/munge.socket" --key-file="$work/munge.key" \
    --pid-file="$work/munged.pid" --seed-file="$work/munged.seed" 2>"$work/munged.log" &
daemons=$!
trap 'kill $daemons; wait' EXIT
until [ -S "$work/munge.socket" ]; do kill -0 $! && sleep 0.05; done
slurmctld-wlm -D 2>"$work/slurmctld.log" &
daemons="$! $daemons"
slurmd-wlm -D -d "$root/usr/sbin/slurmstepd-wlm" 2>"$work/slurmd.log" &
daemons="$! $daemons"
for _ in $(seq 300); do
    sinfo --noheader --format=%T 2>"$work/sinfo.log" | grep -q idle && break
    sleep 0.1
done
"$@"

# SPDX-License-Identifier: Apache-2.0
# make help lists what there is.

lab := $(or $(CARGO_TARGET_DIR),target)/release/viola-lab
rt := scripts/with-rt.sh
# QEMU and the kernel of KVM guests, where there may be KVM
kvm := [ ! -w /dev/kvm ] || scripts/qemu-image.sh

.PHONY: help run test test-beds check lint fuzz deny miri loom same-build bench-slices bench-auto bench-mixed bench-deceivers bench-turbo bench-scx bench-vread bench-vpipe bench-copies bench-backlog bench-lanes bench-papers bench-daemon bench-sim roles demo-vread demo-vpipe build deb setup guests clients hadoop lab-image docs clean

help:
	@sed -n 's/^## //p' Makefile

## make run           four guests on one core: stock, the papers' 30 ms slices, viola; table and build/report.html.
##                    KVM guests where KVM runs guests, else User Mode Linux; ARGS="--guests uml" for the latter
run: guests setup
	@scripts/build.sh --bare build --locked --release -p viola -p viola-bench --no-default-features
	@$(kvm)
	@$(rt) $(lab) demo $(ARGS)

## make test          formatting, clippy, unit, property and guest tests; needs root
test:
	@scripts/setup.sh --guests --test --hadoop
	@cargo fmt --all --check
	@$(rt) scripts/test.sh

## make test-beds     long tests: QEMU guests, migration; needs root; ARGS="qemu" for those of a name
test-beds:
	@scripts/setup.sh --guests --test
	@scripts/lab-image.sh
	@scripts/qemu-image.sh
	@scripts/qemu-image.sh --new
	@scripts/qemu-image.sh --lanes
	@scripts/hadoop.sh
	@$(rt) scripts/test-beds.sh $(ARGS)

## make check         before a commit: formatting; clippy and unit tests of the crates that changed
check: setup
	@scripts/check.sh

## make lint          formatting and clippy only
lint: setup
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets -- -D warnings

## make fuzz          all fuzz targets, ten minutes; SECONDS_IN_ALL=60 ARGS="fuse_requests" for a look at one
fuzz: setup
	@scripts/fuzz.sh $(ARGS)

## make deny          dependencies by deny.toml: advisories, licences, versions, origins
deny: setup
	@scripts/deny.sh

## make miri          unit tests of the pure crates under Miri, which finds undefined behaviour
miri: setup
	@scripts/miri.sh

## make loom          models of shared memory under loom, which tries the orders of its accesses
loom: setup
	@scripts/loom.sh

## make same-build    builds viola twice and compares the two byte by byte
same-build: setup
	@scripts/same-build.sh

## make bench-slices  the figures of bench/results/slices.json, about 30 minutes; ARGS="--quick" for a look
bench-slices: guests build
	@$(rt) $(lab) bench slices $(ARGS)

## make demo-vread    a file in HDFS, read by another guest: stock and viola side by side
demo-vread: guests build hadoop
	@$(lab) bench vread --quick --rounds 3 --only "sequential,random,1 MiB read"

## make bench-vread   the figures of bench/results/vread.json, about half an hour; ARGS="--quick" for a look
bench-vread: guests build
	@scripts/hadoop.sh --bench
	@$(lab) bench vread $(ARGS)

## make demo-vpipe    nginx in a guest with busy neighbours: as it is, and with its files sent by the host
demo-vpipe: guests clients build
	@$(lab) bench vpipe --quick --rounds 3 --only "nginx, 16 MiB,nginx, 256 MiB"

## make bench-vpipe   the figures of bench/results/vpipe.json, about 25 minutes; ARGS="--quick" for a look
bench-vpipe: guests clients build
	@$(lab) bench vpipe $(ARGS)

## make bench-copies  copies in emulated PCs with NVMe and virtio disks: bench/results/copies.json, 25 minutes
bench-copies: guests build
	@scripts/qemu-image.sh --new
	@$(lab) bench copies $(ARGS)

## make bench-backlog the figures of bench/results/backlog.json, about twenty minutes; ARGS="--quick" for a look
bench-backlog: guests build
	@scripts/qemu-image.sh --new
	@scripts/guest-kmod.sh
	@$(lab) bench backlog $(ARGS)

## make bench-turbo   the figures of bench/results/turbo.json, about twenty minutes; ARGS="--quick" for a look
bench-turbo: guests clients build
	@scripts/uml-smp.sh
	@$(rt) $(lab) bench turbo $(ARGS)

## make bench-auto    the figures of bench/results/auto.json, half an hour; ARGS="--quick" for a look
bench-auto: guests build
	@$(rt) $(lab) bench auto $(ARGS)

## make bench-mixed   nine guests whose roles change: bench/results/mixed.json, 100 minutes; ARGS="--rounds 1" for a look
bench-mixed: guests hadoop build
	@$(rt) $(lab) bench mixed $(ARGS)

## make bench-deceivers guests that look latency-sensitive and compute: bench/results/deceivers.json, 40 minutes; ARGS="--quick" for a look
bench-deceivers: guests build
	@$(rt) $(lab) bench deceivers $(ARGS)

## make bench-scx     the figures of bench/results/scx.json, about half an hour; ARGS="--quick" for a look
bench-scx: guests build
	@scripts/qemu-image.sh --new
	@scripts/other-schedulers.sh || echo 'bench scx: without scx_lavd and scx_bpfland' >&2
	@$(lab) bench scx $(ARGS)

## make bench-lanes   the figures of bench/results/lanes.json, about half an hour; ARGS="--quick" for a look
bench-lanes: guests build
	@scripts/qemu-image.sh --lanes
	@$(lab) bench lanes $(ARGS)

## make bench-papers  the figures of bench/results/papers.json, about fifty minutes; ARGS="--quick" for a look
bench-papers: guests build
	@scripts/mpi.sh || echo 'bench papers: without MPI' >&2
	@$(rt) $(lab) bench papers $(ARGS)

## make bench-daemon  the figures of bench/results/daemon.json, about eleven minutes; ARGS="--quick" for a look
bench-daemon: build
	@$(lab) bench daemon $(ARGS)

## make bench-sim     the figures of bench/results/sim.json: the simulator's speed, four minutes; ARGS="--quick" for a look
bench-sim: build
	@$(lab) bench sim $(ARGS)

## make roles         class auto on 1,000 simulated hosts whose VMs change roles, four minutes; HOSTS=50 for a look
HOSTS ?= 1000
roles: setup
	@VIOLA_HOSTS=$(HOSTS) cargo test --release -p viola-daemon --lib classes::roles -- --nocapture

## make build         the programs viola and viola-lab (target/release), and the lab's guest image
build: setup
	@scripts/build.sh build --locked --release -p viola -p viola-bench
	@$(kvm)

## make deb           the packages viola and viola-agent, in build/deb
deb: setup
	@scripts/deb.sh

## make lab-image     only the guest image, in build/lab
lab-image: setup
	@scripts/lab-image.sh

## make docs          the book in build/book, and the documentation of the crates in build/book/api
docs: setup
	@scripts/docs.sh

## make clean         everything that was built
clean:
	cargo clean
	rm -rf build

setup:
	@scripts/setup.sh

guests:
	@scripts/setup.sh --guests

# wrk, curl and ssh
clients:
	@scripts/setup.sh --bench

# a private Hadoop and the HDFS plug-in, in build/hadoop
hadoop:
	@scripts/hadoop.sh

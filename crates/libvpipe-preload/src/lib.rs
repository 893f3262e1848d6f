// SPDX-License-Identifier: Apache-2.0
//! `libvpipe_preload.so`: the host sends and copies files, and relays connections, for unmodified programs in a VM.
//!
//! With `LD_PRELOAD` the library replaces `sendfile(2)`, `copy_file_range(2)`, `splice(2)` and the calls that could
//! touch a socket while the host has its connection. An event-driven server sees a socket that accepts nothing for a
//! while; then `sendfile` returns what the host has sent. A call on a blocking socket blocks.
//!
//! | call | on a socket whose connection the host has |
//! |---|---|
//! | `sendfile` | returns the bytes sent since the last call; `EAGAIN` for none |
//! | `splice` from it into a pipe | returns the bytes relayed since the last call; `EAGAIN` for none |
//! | `splice` from a pipe into it | the same, less one byte; `EAGAIN` for none |
//! | `write`, `send`, `read`, `recv` and similar | fails with `EAGAIN`, or waits until the connection is back |
//! | `epoll_ctl` | is recorded, and applied when there is news |
//! | `close`, `close_range`, `closefrom`, `fclose`, `shutdown`, `dup2` onto it | resets the connection |
//! | `dup`, `fcntl(F_DUPFD)`, `dup2` of it | gives an alias: calls on it fail with `EAGAIN` or wait, and its `close` resets nothing |
//! | `sendmsg` with it in `SCM_RIGHTS` | fails with `EAGAIN`, or waits until the connection is back |
//!
//! | file | what it does |
//! |---|---|
//! | `interpose` | the replaced functions of the C library; `real` calls the originals |
//! | `sendfile`, `copy_file_range`, `splice` | the calls that start pipes; `bypass` skips connections that cannot be relayed |
//! | `guard`, `duplicates` | the calls that must not touch a socket while the host has its connection, and those that duplicate it |
//! | `deferred` | work that waits for a lock |
//! | `io_uring` | whether the process uses rings |
//! | `epoll_sets`, `epoll_shortcut` | registrations in epoll sets; waits without a system call |
//! | `pipe_ahead`, `heads`, `http_head` | starts a whole HTTP body at its first part |
//!
//! *Epoll.* The guest's socket is silent and the kernel would report it writable all the time. So the library removes
//! it from the program's epoll sets while the host has nothing new, and adds it again with the program's events when
//! there is news: adding reports what is ready, to level- and edge-triggered programs, and arms an `EPOLLONESHOT`
//! registration again. Programs of `poll` and `select` see the socket writable; a repeated `sendfile` waits up to 10
//! ms there for news.
//!
//! A server that sends small parts waits between them until the socket accepts more. While the library has more to
//! report it answers seven of eight such waits without the kernel, so other events wait at most eight rounds of the
//! loop.
//!
//! *Piping ahead.* Servers send a file in parts. When the response head, written just before, announces the whole
//! file or one range of it, the library starts a pipe for all of it. Then the server's own rate limit has no effect
//! on the bytes: nginx's `limit_rate` slows only its calls. `VIOLA_PIPE_AHEAD=0` switches this off.
//!
//! *Copies.* `copy_file_range` between files waits until the host has copied, at most 1 GiB in one call.
//!
//! *Relays.* A proxy that splices a response of known length (haproxy with `option splice-response`) asks each time
//! for the rest of it; the library recognises that and starts a relay of the rest. Both sockets must be non-blocking.
//! The library leaves requests for 1 GiB or more to the kernel: haproxy makes them for connections without an end,
//! and for longer responses until less than 1 GiB is left.
//!
//! *Signals.* A signal handler may make every call that POSIX allows there, whatever it interrupts: `close`, `read`,
//! `write`, `send`, `recv`, `shutdown`, `dup`, `fcntl` and similar. These wait for no lock, call no `dlsym`, and neither
//! allocate nor free memory; `deferred` tells how. So a `close` in a handler that interrupts the library ends after the
//! handler, and a `dup2` onto a socket that the host has may fail there with `EBUSY`. A handler must not call
//! `sendfile`, `splice` and `epoll_ctl`, which are not in POSIX's list. Neither a signal nor `SO_SNDTIMEO` and
//! `SO_RCVTIMEO` end a call that waits for the host on a blocking socket; the end of the connection does.
//!
//! *Forks.* A forked child has no pipes, and its `close` ends none of its parent's; the same holds after vfork. Its
//! locks are its own, so it finds none held. A socket whose connection the host has at the fork is an alias in the
//! child. The library does not see that a child has a socket that its parent hands over later.
//!
//! *Limits.* The library does not see `splice` of a file through a pipe, `splice` of a connection into a file, streams
//! of the C library (`fdopen`, `dprintf`), `syscall(2)` and `io_submit`. It looks for `io_uring` once a second, and
//! hands no socket over once the process has a ring. It needs a 64-bit system where variable arguments are in
//! registers (x86-64, AArch64).

mod bypass;
mod copy_file_range;
mod deferred;
mod duplicates;
mod epoll_sets;
mod epoll_shortcut;
mod guard;
mod heads;
mod http_head;
mod interpose;
mod io_uring;
mod pipe_ahead;
mod real;
mod sendfile;
mod splice;

/// Before `main`, the library does what takes locks when it is done first: a signal handler could be the first caller
/// later. nginx clears its environment, so the library reads it here, too.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    real::resolve();
    guard::catch_panic((), || {
        vpipe::engine::watch_forks();
        vpipe::engine::set_unlock_hook(deferred::run);
        _ = vpipe::settings();
    });
}

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
//! | `close`, `close_range`, `closefrom`, `shutdown`, `dup2` onto it | resets the connection |
//!
//! | file | what it does |
//! |---|---|
//! | `interpose` | the replaced functions of the C library; `real` calls the originals |
//! | `sendfile`, `copy_file_range`, `splice` | the calls that start pipes; `bypass` skips connections that cannot be relayed |
//! | `guard` | the calls that must not touch a socket while the host has its connection |
//! | `epoll_sets`, `epoll_shortcut` | registrations in epoll sets; waits without a system call |
//! | `pipe_ahead`, `http_head` | starts a whole HTTP body at its first part |
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
//! *Signals and forks.* A forked child has no pipes, and its `close` ends none of its parent's; the same holds after
//! vfork. A signal handler must not close a socket that it may have interrupted in `sendfile`. Neither a signal nor
//! `SO_SNDTIMEO` and `SO_RCVTIMEO` end a call that waits for the host on a blocking socket; the end of the connection
//! does.
//!
//! *Limits.* The library does not see `splice` of a file through a pipe, `splice` of a connection into a file,
//! `sendmmsg`, `recvmmsg` and `io_uring`. It needs a 64-bit system.

mod bypass;
mod copy_file_range;
mod epoll_sets;
mod epoll_shortcut;
mod guard;
mod http_head;
mod interpose;
mod pipe_ahead;
mod real;
mod sendfile;
mod splice;

/// nginx clears its environment, so the library reads it before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    guard::catch_panic((), || _ = vpipe::settings());
}

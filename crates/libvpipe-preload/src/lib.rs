// SPDX-License-Identifier: Apache-2.0
//! `libvpipe_preload.so`: unmodified programs in a VM have their files sent and copied, and their connections relayed, by the host.
//!
//! With `LD_PRELOAD` it takes the place of `sendfile(2)`, `copy_file_range(2)`, `splice(2)` and of the calls that could touch a socket while the host has its
//! connection. A server of events sees a socket that takes nothing for a while; then `sendfile` tells it what the host has
//! sent. One that blocks, blocks.
//!
//! | call | on a socket whose connection the host has |
//! |---|---|
//! | `sendfile` | what was sent since the last one; `EAGAIN` when that is nothing |
//! | `splice` out of it into a pipe | what was relayed since the last one; `EAGAIN` when that is nothing |
//! | `splice` out of a pipe into it | the same, a byte less; `EAGAIN` when nothing is new |
//! | `write`, `send`, `read`, `recv` and their kin | `EAGAIN`, or waits until the connection is back |
//! | `epoll_ctl` | is remembered, and done when there is news |
//! | `close`, `close_range`, `closefrom`, `shutdown`, `dup2` onto it | the connection is reset |
//!
//! *Epoll.* The guest's socket is silent, and would be reported writable for ever. So it leaves the program's epoll sets when
//! the host has nothing new, and is added again, with the events that the program wants, when there is news: adding
//! reports what is ready, to programs of levels and of edges. A registration with `EPOLLONESHOT` is armed again by that.
//! Programs of `poll` and `select` see the socket writable; a repeated `sendfile` waits up to 10 ms there for news.
//!
//! A loop that sends a little at a time waits in between until the socket takes more. While it is told what the host has sent, seven
//! of eight such waits are answered without the kernel, so nothing else waits longer than eight turns of the loop.
//!
//! *Piping ahead.* Servers send a file in pieces. When the head of the response, written just before, says that the
//! whole file or one range of it follows, all of that is begun at once. Then the server's own pace is not seen: nginx's
//! `limit_rate` slows only its reading of the count, not the bytes. `VIOLA_PIPE_AHEAD=0` switches it off.
//!
//! *Copies.* `copy_file_range` between files waits until the host has copied, at most 1 GiB in one call.
//!
//! *Relays.* A proxy that splices an answer of known length (haproxy with `option splice-response`) asks each time for what is left of
//! it, and the rest is given away when that is seen. Neither socket may block. Who asks for 1 GiB or more, as haproxy does of
//! connections without an end and of longer answers until less is left, is left alone.
//!
//! *Signals and forks.* The child of a fork has no pipes, and its `close` ends none of its parent's; that of a vfork neither.
//! A signal handler must not close a socket that it may have interrupted in the middle of `sendfile`. A call that waits for the
//! host on a socket that blocks is not ended by a signal, nor by `SO_SNDTIMEO` and `SO_RCVTIMEO`; the end of the connection
//! ends it.
//!
//! *Later.* Not seen are `splice` of a file through a pipe and of a connection into a file, not
//! `sendmmsg` and `recvmmsg`, and nothing of `io_uring`. Machines of 64 bits only.

mod ahead;
mod alone;
mod board;
mod gate;
mod head;
mod interpose;
mod range;
mod real;
mod sendfile;
mod spare;
mod splice;

/// nginx throws its environment away: what it says is read before the program begins.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    gate::guarded((), || _ = vpipe::settings());
}

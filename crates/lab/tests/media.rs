// SPDX-License-Identifier: Apache-2.0
//! Voice calls, videos and web pages of a guest, for a client on the host and for one behind a WAN
//! line. Needs root and the image that `scripts/lab-image.sh` makes.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::{Duration, Instant};

use support::{ONE, boot};
use viola_lab::load::{
    Arrivals, Call, Client, Http, Spacing, TcpBulk, VideoSession, call, http, tcp_stream,
    watch_video,
};
use viola_lab::media::{Quality, Stream};
use viola_lab::wire::Workload;
use viola_lab::{Delay, Error, WanClient};

const MS: Duration = Duration::from_millis(1);

#[test]
fn a_call_and_a_video_arrive_complete() {
    let bench = boot("t-media", &format!("{ONE}workloads=[{{kind='media'}}]\n"));
    let guest = bench.lab.guest("a").unwrap();
    let to = guest.address().unwrap();
    let up = Stream::voice(3, 50);
    let options = Call {
        up,
        ..Call::default()
    };
    // the second call gets no packet of the first
    for _ in 0..2 {
        let received = call(&bench.lab, to, &options).unwrap();
        assert_eq!((received.up.len(), received.down.len()), (150, 150));
        for way in [&received.up, &received.down] {
            let quality = Quality::of(up, way, 60.0).unwrap();
            assert_eq!(quality.lost, 0.0);
        }
    }
    let watched = watch_video(
        &bench.lab,
        to,
        &VideoSession {
            packets: 20,
            ..VideoSession::default()
        },
    );
    let watched = watched.unwrap();
    assert_eq!((watched.video.len(), watched.audio.len()), (20, 20));
    assert!(!watched.trips_ms.is_empty() && watched.play_ms > 0.0);
    let endless = Call {
        up: Stream::voice(1, 50_000),
        ..Call::default()
    };
    assert!(matches!(
        call(&bench.lab, to, &endless),
        Err(Error::Load(_))
    ));
}

#[test]
fn a_wan_client_is_delayed_by_its_line_only() {
    let servers = "workloads=[{kind='media'},{kind='apache'},{kind='sink'}]\n";
    let bench = boot("t-far", &format!("{ONE}{servers}"));
    let guest = bench.lab.guest("a").unwrap();
    let to = guest.address().unwrap();
    let far = WanClient::new(&bench.lab, Client::default(), Delay::constant(30 * MS)).unwrap();
    let options = Http {
        port: 8080,
        requests: 20,
        ..Http::default()
    };
    let near = http(&bench.lab, to, &options).unwrap();
    let away = http(&far, to, &options).unwrap();
    for found in [&near, &away] {
        assert_eq!((found.answered, &found.first_failure), (20, &None));
    }
    // one delay for the connection, one for the request
    assert!(away.connect_us.iter().all(|us| *us >= 30_000.0), "{away:?}");
    assert!(away.us.iter().all(|us| *us >= 60_000.0), "{away:?}");

    // an open loop sends whether the last request was answered or not
    let begin = Instant::now();
    let rated = Http {
        requests: 50,
        connections: 50,
        arrivals: Arrivals::Open {
            rate: 100.0,
            spacing: Spacing::Even,
        },
        ..options
    };
    let found = http(&far, to, &rated).unwrap();
    assert_eq!(found.answered, 50, "{:?}", found.first_failure);
    assert!(begin.elapsed() >= 490 * MS);

    // a random delay makes jitter on the way to the guest, which is delayed, and none on the way
    // back
    far.set_delay(Delay {
        low: 20 * MS,
        high: 40 * MS,
    });
    let up = Stream::voice(1, 150);
    let received = call(
        &far,
        to,
        &Call {
            up,
            ..Call::default()
        },
    );
    let received = received.unwrap();
    let jitter = |way| Quality::of(up, way, 60.0).unwrap().jitter_ms;
    let (upstream, downstream) = (jitter(&received.up), jitter(&received.down));
    assert!(
        upstream > 3.0 && downstream < upstream,
        "{upstream} {downstream}"
    );

    // large segments pass whole
    far.set_delay(Delay::constant(MS));
    let before = guest.stat("sink").unwrap().bytes;
    let options = TcpBulk {
        time: 500 * MS,
        ..TcpBulk::default()
    };
    tcp_stream(&far, to, &options).unwrap();
    assert!(guest.stat("sink").unwrap().bytes > before + (1 << 20));
    guest.stop("apache").unwrap();
    guest.start("apache", Workload::apache()).unwrap();
}

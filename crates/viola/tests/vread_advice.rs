// SPDX-License-Identifier: Apache-2.0
//! A VM that gets HDFS blocks from a DataNode VM of its host, where nobody has allowed it to read that VM's disk. The test needs root, the
//! lab's image, BPF and two cores. What is sent is a stream from the DataNode's port: viola looks at nothing else.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use common::guests::Rig;
use common::stdout;

const COMMAND_TIMEOUT: Duration = Duration::from_secs(20);
/// Two samples of a second, 30 s apart, and time for a machine that is busy.
const ADVICE_TIMEOUT: Duration = Duration::from_secs(90);

#[test]
fn a_vm_that_reads_blocks_of_another_one_is_told_how_to_read_them_from_the_disk() {
    let rig = Rig::boot(&[("client", ""), ("dn", ""), ("other", "")], "");
    let address = rig.guest("dn").address().unwrap();
    let sh = |name: &str, script: String| {
        let guest = rig.guest(name);
        let output = guest.exec_for(&["sh", "-c", &script], "", COMMAND_TIMEOUT);
        assert_eq!(output.unwrap().status, 0, "{script}");
    };
    // To `other` come bytes from another port: these are no blocks.
    sh("dn", "mkdir /tmp/d && truncate -s 1G /tmp/d/f".into());
    for (port, reader) in [(9866, "client"), (8080, "other")] {
        sh("dn", format!("httpd -p {port} -h /tmp/d"));
        let read = format!("while :; do wget -q -O /dev/null http://{address}:{port}/f; done");
        sh(reader, format!("({read}) >/dev/null 2>&1 &"));
    }
    let start = Instant::now();
    while !stdout(&rig.daemon.ask(&["advise"])).contains("vread") {
        if start.elapsed() > ADVICE_TIMEOUT {
            panic!("no advice: {}", stdout(&rig.daemon.ask(&["vms"])));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let said = stdout(&rig.daemon.ask(&["advise"]));
    println!("{said}{}", rig.daemon.log());
    assert!(
        said.contains("of HDFS blocks over the network from dn, which runs on this host")
            && said.contains("[[vread.allow]] with reader = \"client\" and datanode = \"dn\""),
        "{said}"
    );
    assert_eq!(said.matches("vread.allow").count(), 1, "{said}");
    assert_eq!(rig.daemon.log().matches("vread could help").count(), 1);
}

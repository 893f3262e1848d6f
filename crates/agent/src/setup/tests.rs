// SPDX-License-Identifier: Apache-2.0
//! What setup writes, and takes back.

use super::*;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

fn setup(places: &Places, extent: Extent) -> Result<String, SetupError> {
    let mut said = String::new();
    super::setup(places, extent, &mut |text| said += text).map(|()| said)
}

fn remove(places: &Places, now: bool) -> Result<String, SetupError> {
    let mut said = String::new();
    super::remove(places, now, &mut |text| said += text).map(|()| said)
}

/// A file with its folders.
fn file(places: &Places, path: &str, text: &str) -> PathBuf {
    let path = places.root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
    path
}

/// A VM in which nginx runs.
fn vm() -> (tempfile::TempDir, Places) {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let process = path("proc/20");
    fs::create_dir_all(&process).unwrap();
    fs::write(process.join("comm"), "nginx\n").unwrap();
    fs::write(process.join("status"), "Uid:\t33\t33\t33\t33\n").unwrap();
    fs::write(process.join("cgroup"), "0::/system.slice/nginx.service\n").unwrap();
    fs::create_dir_all(path("etc/nginx")).unwrap();
    fs::create_dir_all(path("etc/viola")).unwrap();
    fs::write(
        path("etc/nginx/nginx.conf"),
        format!("root {};\n", dir.path().display()),
    )
    .unwrap();
    fs::write(path("etc/viola/agent.toml"), "# mine\n").unwrap();
    let places = Places {
        config: path("etc/viola/agent.toml"),
        root: dir.path().canonicalize().unwrap(),
        state: path("lib/setup.json"),
        systemctl: path("systemctl"),
    };
    (dir, places)
}

fn drop_in(places: &Places) -> PathBuf {
    places
        .root
        .join("etc/systemd/system/nginx.service.d/viola.conf")
}

#[test]
fn what_is_written_is_taken_back() {
    let (_dir, places) = vm();
    let dry = setup(&places, Extent::DryRun).unwrap();
    assert!(dry.contains("would write"), "{dry}");
    assert_eq!(read(&places.config).unwrap().unwrap(), "# mine\n");
    let said = setup(&places, Extent::Write).unwrap();
    assert!(said.contains("found: nginx (33) with files in"), "{said}");
    assert!(said.contains("systemctl restart nginx.service"), "{said}");
    assert!(drop_in(&places).exists());
    let first = read(&places.config).unwrap();
    setup(&places, Extent::Write).unwrap();
    assert_eq!(
        read(&places.config).unwrap(),
        first,
        "a second time changes nothing"
    );
    remove(&places, false).unwrap();
    assert_eq!(read(&places.config).unwrap().unwrap(), "# mine\n");
    assert!(!drop_in(&places).exists() && !places.state.exists());
    assert_eq!(
        remove(&places, false).unwrap(),
        "there is nothing to take back\n"
    );
}

#[test]
fn what_was_changed_since_stays() {
    let (_dir, places) = vm();
    setup(&places, Extent::Write).unwrap();
    fs::write(drop_in(&places), "[Service]\n").unwrap();
    fs::write(&places.config, "data = []\n").unwrap();
    let said = remove(&places, false).unwrap();
    assert_eq!(
        said.matches("was changed since and stays").count(),
        2,
        "{said}"
    );
    assert_eq!(read(&places.config).unwrap().unwrap(), "data = []\n");
}

#[test]
fn a_setup_that_was_killed_after_its_record_is_taken_back() {
    let (_dir, places) = vm();
    setup(&places, Extent::Write).unwrap();
    // As if it had ended before it wrote the files.
    fs::remove_file(drop_in(&places)).unwrap();
    fs::write(&places.config, "# mine\n").unwrap();
    assert_eq!(remove(&places, false).unwrap(), "");
    assert_eq!(read(&places.config).unwrap().unwrap(), "# mine\n");
    assert!(!places.state.exists());
}

#[test]
fn what_was_there_before_is_known_however_often_setup_ran_and_ended() {
    let (_dir, places) = vm();
    setup(&places, Extent::Write).unwrap();
    let first = read(&places.config).unwrap().unwrap();
    // Another server; the second setup ends after its record.
    let process = places.root.join("proc/30");
    fs::create_dir_all(&process).unwrap();
    fs::write(process.join("comm"), "haproxy\n").unwrap();
    setup(&places, Extent::Write).unwrap();
    assert_ne!(read(&places.config).unwrap().unwrap(), first);
    fs::write(&places.config, &first).unwrap();
    setup(&places, Extent::Write).unwrap();
    remove(&places, false).unwrap();
    assert_eq!(read(&places.config).unwrap().unwrap(), "# mine\n");
}

#[test]
fn another_files_record_is_not_lost() {
    let (_dir, places) = vm();
    setup(&places, Extent::Write).unwrap();
    let other = Places {
        config: places.root.join("etc").join("other.toml"),
        ..places.clone()
    };
    for refused in [
        setup(&other, Extent::Write).unwrap_err(),
        remove(&other, false).unwrap_err(),
    ] {
        assert!(
            matches!(&refused, SetupError::OtherFile { path } if *path == places.config),
            "{refused}"
        );
    }
}

#[test]
fn a_drop_in_of_the_operator_stays() {
    let (_dir, places) = vm();
    fs::create_dir_all(drop_in(&places).parent().unwrap()).unwrap();
    fs::write(drop_in(&places), "[Service]\nNice=5\n").unwrap();
    let said = setup(&places, Extent::Write).unwrap();
    assert!(said.contains("is there already; add Environment"), "{said}");
    remove(&places, false).unwrap();
    assert_eq!(
        read(&drop_in(&places)).unwrap().unwrap(),
        "[Service]\nNice=5\n"
    );
}

#[test]
fn a_link_stays_a_link_and_a_private_file_private() {
    let (_dir, places) = vm();
    let target = places.root.join("etc").join("managed.toml");
    fs::rename(&places.config, &target).unwrap();
    fs::set_permissions(&target, fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink(&target, &places.config).unwrap();
    setup(&places, Extent::Write).unwrap();
    assert!(fs::symlink_metadata(&places.config).unwrap().is_symlink());
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!((mode(&target), mode(&places.state)), (0o640, 0o600));
    assert!(read(&target).unwrap().unwrap().contains("[pipe]"));
}

#[test]
fn a_vm_without_servers_and_a_broken_file_are_named() {
    let (_dir, places) = vm();
    fs::write(&places.config, "data = [").unwrap();
    let refused = setup(&places, Extent::Write).unwrap_err().to_string();
    assert!(
        refused.contains("agent.toml") && refused.contains("correct it"),
        "{refused}"
    );
    fs::write(&places.config, "").unwrap();
    fs::remove_dir_all(places.root.join("proc/20")).unwrap();
    let said = setup(&places, Extent::Write).unwrap();
    assert!(said.starts_with("no DataNode"), "{said}");
    assert!(!places.state.exists());
}

/// A VM to which the host gives blocks, and an HDFS client that is unpacked there.
fn reader() -> (tempfile::TempDir, Places) {
    let (dir, places) = vm();
    fs::remove_dir_all(places.root.join("proc/20")).unwrap();
    file(&places, "sys/fs/virtiofs/0/tag", "viola\n");
    file(
        &places,
        "opt/hadoop/etc/hadoop/hdfs-site.xml",
        "<configuration>\n</configuration>\n",
    );
    file(&places, "opt/hadoop/share/hadoop/common/lib/a.jar", "");
    (dir, places)
}

#[test]
fn a_reading_vm_gets_the_mount_the_jar_and_the_property_and_loses_them() {
    let (_dir, places) = reader();
    let site = places.root.join("opt/hadoop/etc/hadoop/hdfs-site.xml");
    let jar = places
        .root
        .join("opt/hadoop/share/hadoop/common/lib/viola-hdfs.jar");
    let unit = places.root.join("etc/systemd/system/mnt-viola.mount");
    fs::create_dir_all(unit.parent().unwrap()).unwrap();
    let said = setup(&places, Extent::Write).unwrap();
    assert!(
        said.contains("systemctl enable --now mnt-viola.mount"),
        "{said}"
    );
    assert!(
        !said.contains("viola-agent"),
        "the agent has nothing to do here: {said}"
    );
    assert!(read(&site).unwrap().unwrap().contains("org.viola.hdfs"));
    assert_eq!(fs::read_link(&jar).unwrap(), Path::new(hdfs_client::JAR));
    assert!(read(&unit).unwrap().unwrap().contains("What=viola"));
    let wanted = "etc/systemd/system/multi-user.target.wants/mnt-viola.mount";
    let wanted = file(&places, wanted, "");
    let said = remove(&places, false).unwrap();
    assert!(!wanted.exists(), "systemd would look for it");
    assert!(said.contains("systemctl stop mnt-viola.mount"), "{said}");
    assert_eq!(
        read(&site).unwrap().unwrap(),
        "<configuration>\n</configuration>\n"
    );
    assert!(fs::symlink_metadata(&jar).is_err() && !unit.exists());
    assert!(unit.parent().unwrap().exists(), "no folder of drop-ins");
}

#[test]
fn without_blocks_an_hdfs_client_stays_as_it_is_and_the_step_on_the_host_is_named() {
    let (_dir, places) = reader();
    fs::remove_dir_all(places.root.join("sys/fs")).unwrap();
    let said = setup(&places, Extent::Write).unwrap();
    assert!(
        said.starts_with("no DataNode") && said.contains("`viola prepare`"),
        "{said}"
    );
    assert!(!places.state.exists());
}

#[test]
fn a_vm_that_reads_by_a_stream_gets_the_agents_mount() {
    let (_dir, places) = reader();
    file(&places, "dev/virtio-ports/org.viola.read.0", "");
    let said = setup(&places, Extent::Write).unwrap();
    assert!(
        said.contains("restart viola-agent") && !said.contains("mnt-viola.mount"),
        "{said}"
    );
    let config = read(&places.config).unwrap().unwrap();
    assert!(
        config.contains("[mount]\npath = \"/mnt/viola\"\n"),
        "{config}"
    );
}

/// A program in place of systemctl that writes down what it was asked, and fails at `refused`.
fn systemd(places: &Places, refused: &str) {
    let log = places.root.join("asked").display().to_string();
    let text = format!(
        "#!/bin/sh\necho \"$*\" >>{log}\n[ \"$*\" != '{refused}' ] || {{ echo no such unit >&2; exit 5; }}\n"
    );
    let program = file(places, "systemctl", &text);
    fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn now_starts_the_agent_and_then_the_servers() {
    let (_dir, places) = vm();
    systemd(&places, "");
    let said = setup(&places, Extent::Now).unwrap();
    assert!(
        said.contains("done: systemctl restart nginx.service"),
        "{said}"
    );
    assert!(!said.contains("left to do"), "{said}");
    let asked = || read(&places.root.join("asked")).unwrap().unwrap();
    assert_eq!(
        asked(),
        "daemon-reload\nenable viola-agent\nrestart viola-agent\nrestart nginx.service\n"
    );
    fs::remove_file(places.root.join("asked")).unwrap();
    remove(&places, true).unwrap();
    assert_eq!(
        asked(),
        "daemon-reload\nrestart nginx.service\ntry-restart viola-agent\n"
    );
}

#[test]
fn a_command_that_fails_is_named_and_what_was_written_can_be_taken_back() {
    let (_dir, places) = vm();
    systemd(&places, "enable viola-agent");
    let failed = setup(&places, Extent::Now).unwrap_err().to_string();
    assert!(
        failed.starts_with("systemctl enable viola-agent: exit status: 5: no such unit"),
        "{failed}"
    );
    remove(&places, false).unwrap();
    assert!(!drop_in(&places).exists());
}

#[test]
fn a_reading_vms_mount_ends_before_its_unit_goes() {
    let (_dir, places) = reader();
    systemd(&places, "");
    setup(&places, Extent::Now).unwrap();
    remove(&places, true).unwrap();
    assert_eq!(
        read(&places.root.join("asked")).unwrap().unwrap(),
        "daemon-reload\nenable --now mnt-viola.mount\ndisable --now mnt-viola.mount\ndaemon-reload\n"
    );
}

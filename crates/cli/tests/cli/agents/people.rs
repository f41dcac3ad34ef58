//! Tests of people besides root at the agent's unix socket. None of these tests swaps.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use aquifer_api::path;

use super::framework::{Cluster, Host, Spec, lacks_rights};

/// Sends a request over a unix socket; prints the status and the body of the answer.
const ASK: &str = r#"
import socket, sys
path, method, where, body = sys.argv[1:]
s = socket.socket(socket.AF_UNIX)
s.settimeout(60)
s.connect(path)
head = f"{method} {where} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
s.sendall((head + body).encode())
heard = b""
while some := s.recv(65536): heard += some
head, _, body = heard.decode().partition("\r\n\r\n")
print(head.split(" ")[1], body)
"#;

/// Asks the host's agent as the user 'nobody' with these supplementary groups.
fn ask(host: &Host, groups: &str, (method, path, body): (&str, &str, &str)) -> (u16, String) {
    let mut command = Command::new("setpriv");
    // A Python of root's home is not for others.
    command.env("PATH", "/usr/local/bin:/usr/bin:/bin");
    command.args(["--reuid=65534", "--regid=65534"]);
    match groups {
        "" => command.arg("--clear-groups"),
        groups => command.arg(format!("--groups={groups}")),
    };
    command.args(["python3", "-c", ASK]).arg(host.socket()).args([method, path, body]);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let (status, body) = text.split_once(' ').unwrap_or_else(|| panic!("{error}"));
    (status.parse().unwrap(), body.to_owned())
}

/// Lets others than root look for the host's socket.
fn open_directories(cluster: &Cluster, host: &Host) {
    for dir in [cluster.dir(), host.dir(), &host.state()] {
        fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    }
}

#[test]
fn a_persons_groups_decide_what_they_may_do() {
    if lacks_rights() {
        return;
    }
    // The first groups of every Linux system.
    let spec =
        Spec::new("a").set("access", "read", vec!["daemon"]).set("access", "operate", vec!["bin"]);
    let cluster = Cluster::created(spec);
    let a = &cluster["a"];
    open_directories(&cluster, a);
    let (daemon, bin) = ("1", "2");
    let status = ("GET", path::STATUS, "");
    let give_back = ("POST", path::RETURN, "{}");
    let forget = ("POST", path::FORGET, "{\"host\":\"b\"}");
    for (groups, request, code, said) in [
        ("", status, 403, "needs the role 'read', and user 65534 has no role"),
        (daemon, status, 200, "\"host\":\"a\""),
        (daemon, give_back, 403, "needs the role 'operate', and user 65534 has 'read'"),
        (daemon, give_back, 403, "member of the group bin"),
        (bin, status, 200, "\"host\":\"a\""),
        (bin, forget, 403, "needs the role 'admin', and user 65534 has 'operate'"),
        (bin, forget, 403, "[access] admin"),
        ("1,2", forget, 403, "run this as root"),
    ] {
        let (found, body) = ask(a, groups, request);
        assert!(found == code && body.contains(said), "{groups} {request:?}: {found} {body}");
    }
    let (found, body) = ask(a, bin, give_back);
    assert!(found != 403, "{found} {body}");
    assert_eq!(a.status().host.as_str(), "a", "root may all");
}

#[test]
fn without_roles_the_socket_is_for_root_alone() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::created("a");
    let mode = fs::metadata(cluster["a"].socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

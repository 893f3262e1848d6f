<?php
// SPDX-License-Identifier: Apache-2.0
// An event calendar with the seven operations of Apache Olio, the benchmark of paper 002. All data is in MariaDB.

$db = new PDO('mysql:unix_socket=/run/calendar/socket;dbname=calendar', 'root', '', [
    PDO::ATTR_PERSISTENT => true,
    PDO::ATTR_ERRMODE => PDO::ERRMODE_EXCEPTION,
]);

function rows(string $sql, array $values = []): array
{
    global $db;
    $statement = $db->prepare($sql);
    $statement->execute($values);
    return $statement->fetchAll(PDO::FETCH_ASSOC);
}

function change(string $sql, array $values): void
{
    global $db;
    $db->prepare($sql)->execute($values);
}

function text(string $text): string
{
    return htmlspecialchars($text);
}

function events(array $events): string
{
    $items = array_map(
        fn($e) => "<li>{$e['day']} <a href=\"/event?n={$e['id']}\">" . text($e['title']) . '</a> '
            . text(substr($e['text'], 0, 200)) . '</li>',
        $events
    );
    return '<ul>' . implode("\n", $items) . '</ul>';
}

function home(): string
{
    $soon = rows('SELECT id, title, text, day FROM events ORDER BY day DESC, id DESC LIMIT 10');
    $tags = rows('SELECT tag, COUNT(*) AS n FROM tags GROUP BY tag ORDER BY n DESC LIMIT 30');
    $cloud = array_map(fn($t) => "<a href=\"/tag?n={$t['tag']}\">{$t['tag']}</a> ({$t['n']})", $tags);
    return '<h1>Events</h1>' . events($soon) . '<p>' . implode(', ', $cloud) . '</p>';
}

function login(int $n): string
{
    $found = rows('SELECT name, secret FROM persons WHERE id = ?', [$n]);
    if (!$found || !hash_equals($found[0]['secret'], hash('sha256', "secret $n"))) {
        http_response_code(403);
        return 'nobody';
    }
    $theirs = rows('SELECT id, title, text, day FROM events WHERE owner = ? ORDER BY day LIMIT 10', [$n]);
    return '<h1>' . text($found[0]['name']) . '</h1>' . events($theirs);
}

function tag(string $tag): string
{
    $found = rows('SELECT id, title, text, day FROM events JOIN tags ON event = id WHERE tag = ? ORDER BY day LIMIT 10', [$tag]);
    return '<h1>' . text($tag) . '</h1>' . events($found);
}

function event(int $n): string
{
    $found = rows('SELECT title, text, day, name FROM events e JOIN persons p ON p.id = owner WHERE e.id = ?', [$n]);
    if (!$found) {
        http_response_code(404);
        return 'none';
    }
    [$event] = $found;
    $going = rows('SELECT name FROM attendees JOIN persons ON id = person WHERE event = ? LIMIT 20', [$n]);
    $said = rows('SELECT text, name FROM comments c JOIN persons p ON p.id = person WHERE event = ? ORDER BY c.id LIMIT 20', [$n]);
    $comments = array_map(fn($c) => '<p>' . text($c['name']) . ': ' . text($c['text']) . '</p>', $said);
    return '<h1>' . text($event['title']) . "</h1><p>{$event['day']}, " . text($event['name']) . '</p><p>' . text($event['text'])
        . '</p><p>' . implode(', ', array_map(fn($p) => text($p['name']), $going)) . '</p>' . implode("\n", $comments);
}

function person(int $n): string
{
    $found = rows('SELECT name, about FROM persons WHERE id = ?', [$n]);
    if (!$found) {
        http_response_code(404);
        return 'none';
    }
    $goes = rows('SELECT id, title, text, day FROM events JOIN attendees ON event = id WHERE person = ? ORDER BY day LIMIT 10', [$n]);
    return '<h1>' . text($found[0]['name']) . '</h1><p>' . text($found[0]['about']) . '</p>' . events($goes);
}

function add_person(int $n): string
{
    change('INSERT INTO persons (name, secret, about) VALUES (?, ?, ?)', ["new $n", hash('sha256', "secret $n"), str_repeat('new ', 100)]);
    return '<p>added</p>';
}

function add_event(int $n): string
{
    global $db;
    $db->beginTransaction();
    change("INSERT INTO events (title, text, day, owner) VALUES (?, ?, '2030-01-01', ?)", ["new $n", str_repeat('new ', 250), 1 + $n % 200]);
    $id = $db->lastInsertId();
    foreach ([$n % 50, ($n + 1) % 50] as $tag) {
        change('INSERT INTO tags (event, tag) VALUES (?, ?)', [$id, "tag$tag"]);
    }
    $db->commit();
    return '<p>added</p>';
}

$n = $_GET['n'] ?? '0';
$page = match (strtok($_SERVER['REQUEST_URI'], '?')) {
    '/' => home(),
    '/login' => login((int) $n),
    '/tag' => tag($n),
    '/event' => event((int) $n),
    '/person' => person((int) $n),
    '/add_person' => add_person((int) $n),
    '/add_event' => add_event((int) $n),
};
$html = "<!DOCTYPE html><html><body>$page</body></html>\n";
header('Content-Length: ' . strlen($html));
echo $html;

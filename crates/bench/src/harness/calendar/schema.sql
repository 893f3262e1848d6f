-- SPDX-License-Identifier: Apache-2.0
-- The data of an event calendar: who there is, what takes place, who goes there and what they say of it.
CREATE TABLE persons (id INT PRIMARY KEY AUTO_INCREMENT, name VARCHAR(60) NOT NULL, secret CHAR(64) NOT NULL,
  about TEXT NOT NULL) ENGINE=InnoDB;
CREATE TABLE events (id INT PRIMARY KEY AUTO_INCREMENT, title VARCHAR(100) NOT NULL, text TEXT NOT NULL,
  day DATE NOT NULL, owner INT NOT NULL, KEY (day), KEY (owner)) ENGINE=InnoDB;
CREATE TABLE tags (event INT NOT NULL, tag VARCHAR(20) NOT NULL, PRIMARY KEY (event, tag), KEY (tag)) ENGINE=InnoDB;
CREATE TABLE attendees (event INT NOT NULL, person INT NOT NULL, PRIMARY KEY (event, person), KEY (person)) ENGINE=InnoDB;
CREATE TABLE comments (id INT PRIMARY KEY AUTO_INCREMENT, event INT NOT NULL, person INT NOT NULL, text TEXT NOT NULL,
  KEY (event)) ENGINE=InnoDB;

// Preloaded into the conformance suite, whose mock servers bind every interface. Some ask for their port in the same turn,
// so naming the address when they listen would be too late: node looks names up first. This is where node opens the
// socket, with no address for "every interface".
"use strict";
const net = require("node:net");

const open = net.Server.prototype._listen2;
net.Server.prototype._listen2 = function (address, port, addressType, ...rest) {
  if (address === null && port !== -1) {
    return open.call(this, "127.0.0.1", port, 4, ...rest);
  }
  return open.call(this, address, port, addressType, ...rest);
};
